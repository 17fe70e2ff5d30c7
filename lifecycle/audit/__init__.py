"""The durable log of one engine, and what is read from it.

`AuditLog` writes: give it to `Lifecycle`, `attach` or `AsyncLifecycle` among the `sinks`,
or set `LIFECYCLE_LOG`. The command `lifecycle audit` reads. What a log looks like is in
`lifecycle.audit.format`, alone.
"""

from lifecycle.audit.log import AuditLog

__all__ = ["AuditLog"]
