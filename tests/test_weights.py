"""Model folders: Hugging Face's and ours are the same, and every damage is one line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rookworld.model import weights
from rookworld.model.gpt2 import GPT2, GPT2Config
from rookworld.model.tokenizer import Tokenizer, chess_tokenizer
from rookworld.model.weights import load_model, resolve_folder, save_model
from rookworld.runtime.atomic_files import atomic_folder
from rookworld.runtime.errors import ModelError, RookworldError

IDS = torch.arange(24).reshape(2, 12) % 64


def small(*, tied: bool = True, seed: int = 5) -> GPT2:
    shape = GPT2Config(
        vocab_size=64, n_positions=32, n_embd=24, n_layer=2, n_head=3, tie_word_embeddings=tied
    )
    return GPT2(shape).init_weights(seed).eval()


def scores(model: GPT2) -> Tensor:
    with torch.no_grad():
        return model.logits(model(IDS))


def tiny_tokenizer() -> Tokenizer:
    return chess_tokenizer(["e2e4"], ["0.3"], ["-"], ["e3"], numbers=2)


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(small(), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("tied", [True, False])
def test_what_we_save_transformers_loads_with_the_same_logits(tmp_path: Path, tied: bool) -> None:
    transformers = import_module("transformers")
    model = small(tied=tied)
    save_model(model, tmp_path / "model", tokenizer=tiny_tokenizer())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits, scores(model), atol=1e-5, rtol=0)
    assert theirs.config.tie_word_embeddings is tied
    assert (theirs.config.resid_pdrop, theirs.config.attn_pdrop, theirs.config.embd_pdrop) == (
        0,
    ) * 3
    assert theirs.generation_config.eos_token_id == tiny_tokenizer().eos
    text = " e2e4 0.3"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer(text)["input_ids"] == tiny_tokenizer().encode(text)


@pytest.mark.parametrize("tied", [True, False])
def test_what_transformers_saves_in_shards_we_load(tmp_path: Path, tied: bool) -> None:
    transformers = import_module("transformers")
    shape = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=24, n_layer=2, n_head=3, tie_word_embeddings=tied
    )
    theirs = transformers.GPT2LMHeadModel(shape).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    ours = load_model(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(scores(ours), theirs(IDS).logits, atol=1e-5, rtol=0)
    assert (ours.lm_head.weight is ours.wte.weight) is tied

    first = sorted(tmp_path.glob("model-*.safetensors"))[0]
    gone = next(iter(load_file(first)))
    tensors = {name: value for name, value in load_file(first).items() if name != gone}
    save_file(tensors, first)
    name = gone.removeprefix("transformer.")
    with pytest.raises(ModelError, match=rf"index\.json: tensor {name} is missing"):
        load_model(tmp_path)
    first.unlink()
    with pytest.raises(ModelError, match=f"there is no file {first.name}"):
        load_model(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_and_loading_changes_nothing(tmp_path: Path, dtype: torch.dtype) -> None:
    model = small(tied=False).to(dtype)
    save_model(model, tmp_path / "model", dtype=dtype)
    again = load_model(tmp_path / "model", dtype=dtype)
    assert again.config == model.config
    assert all(parameter.requires_grad for parameter in again.parameters())
    torch.testing.assert_close(again.state_dict(), model.state_dict(), atol=0, rtol=0)


def test_loaded_weights_do_not_hang_on_their_file(folder: Path) -> None:
    model = load_model(folder)
    before = scores(model)
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * (folder / "model.safetensors").stat().st_size)
    assert torch.equal(scores(model), before)


def test_old_names_and_masks_are_understood(folder: Path) -> None:
    def age(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
        tensors["h.1.attn.masked_bias"] = torch.tensor(-1e4)
        tensors["lm_head.weight"] = tensors["wte.weight"].clone()

    edit_tensors(folder, age)
    model = load_model(folder)
    assert torch.equal(scores(model), scores(small()))
    assert model.lm_head.weight is model.wte.weight


def test_a_head_of_its_own_overrules_the_config(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": torch.ones(64, 24)}))
    model = load_model(folder)
    assert not model.config.tie_word_embeddings
    assert torch.equal(model.lm_head.weight, torch.ones(64, 24))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', only 'gpt2'"),
        ({"activation_function": "relu"}, "activation 'relu', only 'gelu_new'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"n_head": 5}, "n_embd 24 is not divisible by n_head 5"),
        ({"n_layer": "2"}, "n_layer is '2'"),
        ({"n_inner": 0}, "n_inner is 0"),
        ({"layer_norm_epsilon": None}, "layer_norm_epsilon is None"),
    ],
)
def test_other_architectures_are_refused(
    folder: Path, changes: dict[str, object], message: str
) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ModelError, match=rf"config\.json: .*{message}"):
        load_model(folder)


def drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop("transformer.h.1.mlp.c_fc.bias"), r"tensor h\.1\.mlp\.c_fc\.bias is missing"),
        (drop("transformer.wte.weight"), r"tensor wte\.weight is missing"),
        (put("h.7.ln_1.bias", torch.ones(24)), r"tensor h\.7\.ln_1\.bias is not part"),
        (put("ln_f.bias", torch.ones(24)), r"tensor transformer\.ln_f\.bias is also in"),
        (
            put("transformer.h.0.attn.c_attn.weight", torch.ones(72, 24)),
            r".*c_attn\.weight is torch\.float32 \[72, 24\], .* asks for floating point \[24, 72\]",
        ),
        (
            put("transformer.wpe.weight", torch.ones(32, 24, dtype=torch.int8)),
            r".*wpe\.weight is torch\.int8 \[32, 24\]",
        ),
    ],
)
def test_wrong_tensors_are_named_with_their_file(
    folder: Path, edit: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    edit_tensors(folder, edit)
    with pytest.raises(ModelError, match=rf"model\.safetensors: {message}") as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


def test_a_runs_folder_says_where_its_model_is(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "run" / "final")
    (tmp_path / "run" / "config.json").write_text('{"steps": 2}')
    with pytest.raises(ModelError, match=r"its model is .*final"):
        load_model(tmp_path / "run")


def test_damaged_files_are_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for part in (whole[:-100], whole[:40], b""):
        file.write_bytes(part)
        with pytest.raises(ModelError, match=r"model\.safetensors is damaged or incomplete"):
            load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="not a model folder"):
        load_model(folder)


def test_pickles_are_refused_with_the_reason(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle, which can run any code"):
        load_model(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors in"):
        load_model(folder)


def test_an_index_cannot_point_outside_its_folder(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = {"weight_map": {"wte.weight": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"there is no file \.\./outside\.safetensors"):
        load_model(folder)


def test_names_of_models(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_folder(folder) == resolve_folder(str(folder)) == folder
    with pytest.raises(ModelError, match="is a file: give the model folder"):
        resolve_folder(folder / "config.json")
    with pytest.raises(ModelError, match=r"no model folder \./no/such/folder"):
        resolve_folder("./no/such/folder")
    monkeypatch.setattr(weights, "_ASSETS", tmp_path)
    with pytest.raises(ModelError, match="the model 'nano' is missing from this installation"):
        resolve_folder("nano")
    folder.rename(tmp_path / "nano")
    assert resolve_folder("nano") == tmp_path / "nano"


def test_the_hub_offline_is_the_cached_copy_or_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    original = huggingface_hub.snapshot_download

    def offline(name: str, **options: Any) -> str:
        options["local_files_only"] = True
        return str(original(name, cache_dir=tmp_path / "cache", **options))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelError, match="'someone/rook': neither a folder, nor in the") as caught:
        load_model("someone/rook")
    assert "\n" not in str(caught.value)

    repository = tmp_path / "cache" / "models--someone--rook"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    folder.rename(repository / "snapshots" / ("0" * 40))
    assert torch.equal(scores(load_model("someone/rook")), scores(small()))


def test_a_failed_save_leaves_the_old_folder(folder: Path) -> None:
    def fail() -> None:
        with atomic_folder(folder) as unfinished:
            (unfinished / "config.json").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert torch.equal(scores(load_model(folder)), scores(small()))
    assert list(folder.parent.iterdir()) == [folder]


def test_saving_again_replaces_the_model_and_deletes_nothing_else(folder: Path) -> None:
    other = small(seed=6)
    save_model(other, folder)
    assert torch.equal(scores(load_model(folder)), scores(other))
    (folder / "README.md").write_text("mine")
    with pytest.raises(RookworldError, match=r"holds README\.md, which saving there would delete"):
        save_model(small(), folder)
    assert (folder / "README.md").read_text() == "mine"
    assert list(folder.parent.iterdir()) == [folder]
    with pytest.raises(RookworldError, match="cannot write"):
        save_model(small(), folder / "README.md" / "model")


def test_what_killed_processes_left_beside_a_folder_goes(tmp_path: Path) -> None:
    dead = 2**22 + 1  # above what a kernel gives out
    mine, others = tmp_path / "final", tmp_path / f".finals.{dead}.new"
    left = [tmp_path / f".final.{dead}.{kind}" for kind in ("new", "old")]
    running = tmp_path / f".final.{os.getppid()}.new"
    for path in (*left, running, others):
        path.mkdir()
    with atomic_folder(mine) as unfinished:
        (unfinished / "weights").write_text("new")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [mine.name, running.name, others.name]
    )


def test_a_folder_whose_writer_was_killed_between_two_renames_is_back(tmp_path: Path) -> None:
    left = tmp_path / f".final.{2**22 + 1}.old"
    left.mkdir()
    (left / "weights").write_text("whole")
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "final"):
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert (tmp_path / "final" / "weights").read_text() == "whole"


def test_whoever_is_killed_while_tidying_leaves_nothing_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / f".final.{2**22 + 1}.new"
    left.mkdir()

    def killed(path: Path, **_: object) -> None:
        if path == left:
            raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "final"):
        pass
    assert list(tmp_path.iterdir()) == [left]
