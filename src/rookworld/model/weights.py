"""A model folder in the Hugging Face layout to our GPT-2, and back.

Law: what is saved here `AutoModelForCausalLM.from_pretrained` loads with the same logits, and the
other way round. A folder is used whole or not at all: a wrong shape, a missing or unknown tensor or
a damaged file is one line that names it. A saved folder appears complete under its name or not.
Left out on purpose: pickled weights, which can run code when opened, and every other architecture.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rookworld.model.gpt2 import GPT2, GPT2Config
from rookworld.model.tokenizer import Tokenizer
from rookworld.runtime.atomic_files import atomic_folder
from rookworld.runtime.embedded import EMBEDDED_MODELS
from rookworld.runtime.errors import ModelError

"""Models that are part of this package, by name."""

LARGEST = {
    "vocab_size": 2**24,
    "n_positions": 2**20,
    "n_embd": 2**16,
    "n_layer": 2**12,
    "n_head": 2**16,
    "n_inner": 2**20,
}
"""Beyond these a config is damaged: a model is laid out before its weights are looked at."""
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_ASSETS = Path(__file__).parents[1] / "assets"
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_HUB_FILES = [
    *("config.json", "generation_config.json", "model*.safetensors", "*.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"),
]
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# `gelu_pytorch_tanh` is the same function under its later name.
_ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")
# What would change the computation of GPT-2, and the only value that we compute.
_FIXED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
# Causal masks that old checkpoints store beside the weights.
_BUFFER = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
# Hugging Face keeps GPT-2's projections as [in, out], `nn.Linear` as [out, in].
_TRANSPOSED = re.compile(r"h\.\d+\.(attn|mlp)\.c_\w+\.weight")


class _Stored(NamedTuple):
    """Where a tensor lies."""

    file: Path
    name: str


def resolve_folder(source: str | Path) -> Path:
    """The folder of an embedded name, a folder, or a hub id (downloaded, or the cached copy)."""
    if source in EMBEDDED_MODELS:
        folder = _ASSETS / str(source)
        if not (folder / CONFIG).is_file():
            raise ModelError(
                f"the model {source!r} is missing from this installation ({folder}): install "
                "RookWorld anew, or name a folder or a hub id with --model"
            )
        return folder
    path = Path(source)
    if path.is_dir():
        if not (path / WEIGHTS).exists() and (path / "final" / WEIGHTS).is_file():
            raise ModelError(f"{path} is a run's folder: its model is {path / 'final'}")
        return path
    if path.exists():
        raise ModelError(f"{path} is a file: give the model folder that holds it")
    if isinstance(source, str) and _HUB_ID.fullmatch(source):
        return _from_hub(source)
    raise ModelError(f"no model folder {source}")


class _NoValues(TorchFunctionMode):
    """Modules are made without values: to draw some on `meta` torch loads its compiler, a second.

    The file has them all.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else given["tensor"]
        return func(*args, **given)


def load_model(
    source: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> GPT2:
    """The GPT-2 of `source` (see `resolve_folder`) on `device` in `dtype`, in evaluation mode."""
    folder = resolve_folder(source)
    config = read_config(folder)
    stored = _stored_tensors(folder)
    head, table = stored.get("lm_head.weight"), stored.get("wte.weight")
    tied = config.tie_word_embeddings
    if tied and head and table:
        # Weights overrule the config, as in transformers: a head of its own is not thrown away.
        tied = torch.equal(_read(head), _read(table))
    config = GPT2Config(**{**vars(config), "tie_word_embeddings": tied})
    with torch.device("meta"), _NoValues():
        model = GPT2(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if tied:
        stored.pop("lm_head.weight", None)
        del expected["lm_head.weight"]
    state = _read_all(folder, stored, expected, device, dtype)
    model.load_state_dict(state, strict=not tied, assign=True)
    if tied:
        model.lm_head.weight = model.wte.weight
    return model.eval()


def save_model(
    model: GPT2,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write a model folder that Hugging Face loads too, whole or not at all."""
    with atomic_folder(folder) as unfinished:
        write_model(model, unfinished, dtype=dtype, tokenizer=tokenizer)


def write_model(
    model: GPT2,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    tokenizer: Tokenizer | None = None,
) -> None:
    """The files of a model folder, for those who write more beside them in `atomic_folder`."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            if not model.config.tie_word_embeddings:
                tensors[name] = tensor.detach().to("cpu", dtype).contiguous()
            continue
        tensor = tensor.detach().to("cpu", dtype)
        tensor = tensor.t() if _TRANSPOSED.fullmatch(name) else tensor
        tensors[f"transformer.{name}"] = tensor.contiguous()
    try:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:
        raise ModelError(f"cannot write {folder / WEIGHTS}: {error}") from error
    end = tokenizer.eos if tokenizer else None
    ends = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    _write_json(folder / CONFIG, _hub_config(model.config, dtype) | ends)
    _write_json(folder / "generation_config.json", ends)
    # safetensors lets only the owner read; the weights are as public as the rest.
    (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode)
    if tokenizer:
        tokenizer.save(folder)


def read_config(folder: Path) -> GPT2Config:
    """The shape of the model in `folder`; anything but a plain GPT-2 is refused."""
    path = folder / CONFIG
    if not path.is_file():
        raise ModelError(f"no {CONFIG} in {folder}: not a model folder")
    raw = _read_json(path)
    kind = raw.get("model_type", "gpt2" if "GPT2LMHeadModel" in _architectures(raw) else None)
    if kind != "gpt2":
        raise ModelError(f"{path}: model_type is {kind!r}, only 'gpt2' is supported")
    activation = raw.get("activation_function", "gelu_new")
    if activation not in _ACTIVATIONS:
        raise ModelError(f"{path}: activation {activation!r}, only 'gelu_new' is supported")
    for name, value in _FIXED.items():
        if raw.get(name, value) != value:
            raise ModelError(f"{path}: {name} is {raw[name]!r}, only {value!r} is supported")
    if raw.get("quantization_config"):
        raise ModelError(f"{path}: quantized weights are not supported, use the original model")
    return _shape(raw, path)


def _shape(raw: Mapping[str, Any], path: Path) -> GPT2Config:
    sizes = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}
    for name, default in sizes.items():
        value = raw.get(name, default)
        if type(value) is not int or value < 1:
            raise ModelError(f"{path}: {name} is {value!r}, must be a positive whole number")
        if value > LARGEST[name]:
            raise ModelError(f"{path}: {name} is {value}, more than {LARGEST[name]:,}")
        sizes[name] = value
    if sizes["n_embd"] % sizes["n_head"]:
        raise ModelError(
            f"{path}: n_embd {sizes['n_embd']} is not divisible by n_head {sizes['n_head']}"
        )
    inner, epsilon = raw.get("n_inner"), raw.get("layer_norm_epsilon", 1e-5)
    if inner is not None and (type(inner) is not int or not 1 <= inner <= LARGEST["n_inner"]):
        raise ModelError(
            f"{path}: n_inner is {inner!r}, must be null or a positive whole number, at most "
            f"{LARGEST['n_inner']:,}"
        )
    if not isinstance(epsilon, int | float) or not epsilon > 0:
        raise ModelError(f"{path}: layer_norm_epsilon is {epsilon!r}, must be a positive number")
    tied = raw.get("tie_word_embeddings", True) is not False
    return GPT2Config(
        **sizes, n_inner=inner, layer_norm_epsilon=float(epsilon), tie_word_embeddings=tied
    )


def _hub_config(config: GPT2Config, dtype: torch.dtype) -> dict[str, object]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **vars(config),
        "activation_function": "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "dtype": str(dtype).removeprefix("torch."),
    }


def _architectures(raw: Mapping[str, Any]) -> list[object]:
    names = raw.get("architectures")
    return names if isinstance(names, list) else []


def _from_hub(name: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    # The HTTP library below the hub has changed and may again; its root error is found, not named.
    http_error: type[Exception] = HfHubHTTPError.__mro__[1]
    failures = (OSError, ValueError, http_error)
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except failures as error:
        try:
            cached = huggingface_hub.snapshot_download(
                name, allow_patterns=_HUB_FILES, local_files_only=True
            )
        except failures:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ModelError(
                f"no model {name!r}: neither a folder, nor in the Hugging Face cache, "
                f"nor to be had from the hub ({reason[0].rstrip('.')})"
            ) from error
        return Path(cached)


def _stored_tensors(folder: Path) -> dict[str, _Stored]:
    """Our name of every tensor in `folder` -> where it lies; causal masks are left out."""
    stored: dict[str, _Stored] = {}
    for file in _weight_files(folder):
        with _open(file) as weights:
            names = list(weights.keys())
        for name in names:
            ours = name.removeprefix("transformer.")
            if _BUFFER.fullmatch(ours):
                continue
            if ours in stored:
                raise ModelError(f"{file}: tensor {name} is also in {stored[ours].file}")
            stored[ours] = _Stored(file, name)
    return stored


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        names = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ModelError(f"{folder / INDEX}: no weight_map of tensor names to files")
        files = sorted(set(names.values()))
        for name in files:
            if Path(name).name != name or not (folder / name).is_file():
                raise ModelError(f"{folder / INDEX}: there is no file {name} in the folder")
        return [folder / name for name in files]
    for pattern in _PICKLES:
        for pickle in sorted(folder.glob(pattern)):
            raise ModelError(
                f"{pickle} is a pickle, which can run any code when it is opened: "
                f"convert it to {WEIGHTS} (save_pretrained of a trusted copy does)"
            )
    raise ModelError(f"no {WEIGHTS} in {folder}")


def _read_all(
    folder: Path,
    stored: Mapping[str, _Stored],
    expected: Mapping[str, tuple[int, ...]],
    device: str | torch.device,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    for name, where in stored.items():
        if name not in expected:
            raise ModelError(f"{where.file}: tensor {where.name} is not part of this GPT-2")
    state = {}
    for name, shape in expected.items():
        if name not in stored:
            file = folder / (WEIGHTS if (folder / WEIGHTS).is_file() else INDEX)
            raise ModelError(f"{file}: tensor {name} is missing")
        where = stored[name]
        tensor = _read(where)
        tensor = tensor.t() if _TRANSPOSED.fullmatch(name) and tensor.dim() == 2 else tensor
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            has, needs = list(_read(where).shape), list(shape)
            needs = needs[::-1] if _TRANSPOSED.fullmatch(name) else needs
            raise ModelError(
                f"{where.file}: tensor {where.name} is {tensor.dtype} {has}, "
                f"{CONFIG} asks for floating point {needs}"
            )
        # A copy: tensors read from a file stay mapped to it, and the file may be replaced.
        state[name] = torch.empty(shape, device=device, dtype=dtype).copy_(tensor)
    return state


def _read(where: _Stored) -> Tensor:
    with _open(where.file) as weights:
        tensor: Tensor = weights.get_tensor(where.name)
    return tensor


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as weights:
            yield weights
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is damaged or incomplete: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: not a JSON object")
    return content


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
