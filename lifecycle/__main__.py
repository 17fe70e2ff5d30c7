"""`python -m lifecycle`: the command line without an installed script."""

from lifecycle.cli import main

raise SystemExit(main())
