"""Loading a causal language model and its tokenizer: the embedded one, a folder, a GGUF file, or a hub name.

Nothing is patched and nothing is trained here: adapters are the work of `adapters`. A path that exists is never
looked up on the hub, pickled weights are refused, and code that comes with a model is run only when asked for.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from longtune.errors import Problem, UserError, counted
from longtune.model.embedded import EMBEDDED, embedded_folder
from longtune.model.packed.checkpoint import is_mlx, read_config
from longtune.model.packed.gguf import remember_gguf_bits
from longtune.model.packed.loader import load_packed
from longtune.model.packed.onload import (
    check_way,
    dequantised,
    is_compressed,
    quantising,
    remember_compressed_bits,
    settle,
)

Source = Literal["embedded", "folder", "gguf", "hub"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to be given an adapter.

    Attributes:
        model: the causal LM, in eval mode, on its device, with every parameter frozen.
        tokenizer: its tokenizer.
        name: the name that was asked for.
        source: where it came from.
        path: the folder or file that was read; None for a hub model.
        dtype_reason: which dtype was chosen and why, for reports.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    source: Source
    path: Path | None
    dtype_reason: str


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    quantise: str | None = None,
) -> Loaded:
    """Load a causal LM with its tokenizer.

    Args:
        name: "smollm2" (the embedded model), a model folder, a .gguf file, or a hub name.
        dtype: auto, float32, bfloat16 or float16. Quantised weights keep their own storage.
        device: auto (CUDA, else MPS, else the CPU) or what `torch.device` takes.
        trust_remote_code: run Python code that comes with the model.
        quantise: store the weights of a plain model in fewer bits (see `packed.onload.WAYS`); None leaves them as
            they are.

    Raises:
        UserError: anything about the name, the files, the dtype or the device that the user must change.
    """
    target = choose_device(device)
    torch_dtype, reason = choose_dtype(dtype, target)
    with _quiet():
        source, path = _resolve(name)
        packed = path is not None and path.is_dir() and is_mlx(path)
        if quantise is not None:
            check_way(quantise, f"model: {name}", packed=packed, gguf=source == "gguf")
        if source == "gguf":
            assert path is not None
            model, tokenizer = load_gguf(path, torch_dtype)
        elif packed:
            assert path is not None
            model = load_packed(path, torch_dtype, target)
            tokenizer = _load_tokenizer(
                str(path), f"model: {name}", {"local_files_only": True, "trust_remote_code": trust_remote_code}
            )
        else:
            model, tokenizer = _load_pretrained(name, path, torch_dtype, target, trust_remote_code, quantise)
    if getattr(model, "hf_device_map", None) is None and not getattr(model, "is_quantized", False):
        model.to(target)  # pyright: ignore[reportArgumentType]
    model.requires_grad_(False)
    model.eval()
    return Loaded(model, tokenizer, name, source, path, reason)


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model alone; a folder needs no weights.

    Args:
        name: as for `load_model`.

    Raises:
        UserError: there is no such model, or it has no tokenizer that loads.
    """
    place = f"model: {name}"
    with _quiet():
        folder = Path(name).expanduser()
        source, path = ("folder", folder) if name != EMBEDDED and folder.is_dir() else _resolve(name)
        common: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": path is not None}
        where = str(path) if path is not None else name
        if source == "gguf":
            assert path is not None
            where, common["gguf_file"] = str(path.parent), path.name
        try:
            return _load_tokenizer(where, place, common)
        except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
            raise UserError(explain(error, place, path, trust_remote_code)) from error


def choose_device(device: str) -> torch.device:
    """The device that `device` names; "auto" takes CUDA, then MPS, then the CPU."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError:
        target = None
    # torch knows devices without memory or without a backend here (meta, xpu, ...).
    if target is None or target.type not in ("cpu", "cuda", "mps"):
        raise UserError(Problem("device", f"{device!r} is no device", "use auto, cpu, cuda, cuda:N or mps"))
    missing = (target.type == "cuda" and not torch.cuda.is_available()) or (
        target.type == "mps" and not torch.backends.mps.is_available()
    )
    if missing:
        raise UserError(Problem("device", f"{device} is not available on this machine", "use auto or cpu"))
    if target.type == "cuda" and (target.index or 0) >= (count := torch.cuda.device_count()):
        raise UserError(
            Problem("device", f"{device} is not there: {counted(count, 'CUDA device')}", "count from cuda:0")
        )
    return target


def choose_dtype(dtype: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The dtype of the weights and activations, with the reason.

    "auto" is bfloat16 wherever the hardware multiplies it natively, and float32 elsewhere. On CPUs with bfloat16
    instructions a LoRA step of the embedded model takes about half the time of float32, in half the memory; on a CPU
    without them bfloat16 is emulated, and slower. float16 is never chosen unasked: its range overflows in some models.
    """
    if dtype != "auto":
        if dtype not in _DTYPES:
            raise UserError(Problem("dtype", f"{dtype!r} is unknown", f"use auto, {', '.join(_DTYPES)}"))
        return _DTYPES[dtype], f"{dtype}, as asked"
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "mps":
        native = torch.backends.mps.is_macos_or_newer(14, 0)
    else:
        native = _cpu_multiplies_bfloat16()
    if native:
        return torch.bfloat16, f"bfloat16, as this {device.type} multiplies it natively"
    return torch.float32, f"float32, as this {device.type} has no bfloat16 instructions"


def own_dtype(name: str) -> str:
    """The dtype that a model's config says its weights have; bfloat16 where it says none that is known.

    Raises:
        UserError: there is no such model.
    """
    _, path = _resolve(name)
    if path is None:
        with _quiet():
            try:
                found = AutoConfig.from_pretrained(name).get_text_config().dtype
            except (OSError, ValueError, KeyError) as error:
                raise UserError(explain(error, f"model: {name}", None, False)) from error
    elif path.is_dir():
        values = read_config(path)
        found = values.get("dtype") or values.get("torch_dtype")
    else:
        found = None
    said = str(found).removeprefix("torch.")
    return said if said in _DTYPES else "bfloat16"


def _cpu_multiplies_bfloat16() -> bool:
    # Named avx512_bf16, amx_bf16, sve_bf16, ... by architecture.
    return any(present for name, present in torch.cpu.get_capabilities().items() if "bf16" in name)


def _resolve(name: str) -> tuple[Source, Path | None]:
    """What the name is. Looks at the file system alone."""
    place = f"model: {name}"
    if name == EMBEDDED:
        return "embedded", embedded_folder()
    path = Path(name).expanduser()
    if path.is_dir():
        _check_folder(path, place)
        return "folder", path
    if path.is_file():
        if path.suffix == ".gguf":
            return "gguf", path
        raise UserError(Problem(place, "is a file, but not a .gguf file", "name the folder that holds config.json"))
    parts = name.split("/")
    # "runs/x" beside a folder "runs" is a path that was mistyped, not a name on the hub.
    local = (
        name.startswith((".", "/", "~"))
        or "\\" in name
        or len(parts) > 2
        or (path.parent.name and path.parent.is_dir())
    )
    if local or name.endswith(".gguf") or not all(parts):
        raise UserError(Problem(place, "there is no such folder or file", _nearest_path(path)))
    return "hub", None


def _nearest_path(path: Path) -> str:
    """Advice for a path that doesn't exist: the first missing part, and what lies beside it."""
    parent = path.absolute().parent
    while not parent.exists():
        path, parent = parent, parent.parent
    with contextlib.suppress(OSError):
        names = difflib.get_close_matches(path.name, [entry.name for entry in parent.iterdir()], n=3, cutoff=0.5)
        if names:
            return f"did you mean {' or '.join(str(parent / name) for name in names)}?"
    return f"{parent} exists, but holds no {path.name}"


def _check_folder(folder: Path, place: str) -> None:
    """Refuse a folder that can't be a model, before anything is read into memory."""
    problems = []
    if not (folder / "config.json").is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        if (folder / "adapter_config.json").is_file():
            fix = "name the base model here, and give this folder as init_adapter"
            raise UserError(Problem(place, "is an adapter, not a model", fix))
        if ggufs:
            raise UserError(Problem(place, "holds GGUF weights and no config.json", f"name the file: {ggufs[0]}"))
        problems.append(Problem(place, "has no config.json", "name the folder that the model was saved to"))
    else:
        read_config(folder)
    weights = list(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            listed = {str(file) for file in json.loads(index.read_text())["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(Problem(str(index), f"can't be read ({error})", "download it again")) from None
        missing = sorted(listed - {file.name for file in weights})
        if missing:
            problems.append(Problem(place, f"lacks {', '.join(missing)}", "download the missing files"))
    elif not weights:
        pickled = sorted(file.name for pattern in _PICKLED for file in folder.glob(pattern))
        if pickled:
            problems.append(
                Problem(
                    place,
                    f"holds pickled weights only ({pickled[0]}), which can run code when they are read",
                    "get the model's safetensors files, or convert the ones you trust",
                )
            )
        else:
            problems.append(Problem(place, "holds no weights (*.safetensors)", "download or copy the weights there"))
    if problems:
        raise UserError(problems)


def _load_pretrained(
    name: str,
    path: Path | None,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
    quantise: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer through transformers; `path` is None for a hub name."""
    place = f"model: {name}"
    where = str(path) if path is not None else name
    common: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": path is not None}
    try:
        config = AutoConfig.from_pretrained(where, **common)
        _check_architecture(config, place, trust_remote_code)
        tokenizer = _load_tokenizer(where, place, common)
        existing = getattr(config, "quantization_config", None)
        if quantise is not None:
            common |= quantising(quantise, dtype, existing, place)
        elif is_compressed(existing):
            config.quantization_config = dequantised(existing)
        if device.type != "cpu" or quantise is not None:
            common["device_map"] = {"": device}
        model, report = cast(
            tuple[PreTrainedModel, dict[str, Any]],
            AutoModelForCausalLM.from_pretrained(
                where, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **common
            ),
        )
    except UserError:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        raise UserError(explain(error, place, path, trust_remote_code)) from error
    settle(model, dtype)
    if quantise is None and is_compressed(existing):
        remember_compressed_bits(model, existing)
    if missing := sorted(report["missing_keys"]):
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise UserError(Problem(place, f"the weights lack {shown}", "the files are not whole, or not of this config"))
    return model, tokenizer


def _load_tokenizer(where: str, place: str, common: dict[str, Any]) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(where, **common)
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
        if not common["local_files_only"]:
            raise
        fix = "copy tokenizer.json and tokenizer_config.json of the model there"
        raise UserError(Problem(place, f"has no tokenizer that loads ({_first_line(error)})", fix)) from error


def _check_architecture(config: Any, place: str, trust_remote_code: bool) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    remote = trust_remote_code and "AutoModelForCausalLM" in getattr(config, "auto_map", {})
    if not remote and config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(
            Problem(place, f"{config.model_type} is not a causal language model", "choose a model that generates text")
        )


def explain(error: Exception, place: str, path: Path | None, trust_remote_code: bool) -> Problem:
    """What a failure inside transformers means for the user."""
    text = str(error)
    if "trust_remote_code" in text and not trust_remote_code:
        return Problem(place, "needs Python code that comes with it", "set trust_remote_code if you trust its authors")
    if isinstance(error, ImportError):
        return Problem(place, f"needs a package that is not installed ({_first_line(error)})", "install it with pip")
    if path is None:
        return _explain_hub(error, place)
    if model_type := _unknown_type(path):
        near = difflib.get_close_matches(model_type, list(CONFIG_MAPPING), n=3)
        hint = f"; near names: {', '.join(near)}" if near else ""
        return Problem(
            place,
            f"transformers {transformers.__version__} knows no architecture {model_type!r}{hint}",
            "a newer transformers may: pip install -U transformers",
        )
    if isinstance(error, SafetensorError) and path.is_dir() and (broken := _broken_file(path)) is not None:
        return Problem(str(broken), f"is no whole safetensors file ({_first_line(error)})", "download it again")
    return Problem(place, f"can't be loaded: {_first_line(error)}", "check that the files are whole")


def _broken_file(folder: Path) -> Path | None:
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError):
            return file
    return None


def _explain_hub(error: Exception, place: str) -> Problem:
    from huggingface_hub import constants

    near = [entry.name for entry in Path.cwd().iterdir() if (entry / "config.json").is_file()]
    local = f"here lie {', '.join(sorted(near)[:3])}; " if near else ""
    fix = f"{local}name a folder or a .gguf file, or use model: {EMBEDDED}"
    if constants.HF_HUB_OFFLINE:
        return Problem(place, "is no local path, and the hub is switched off (HF_HUB_OFFLINE)", fix)
    text = str(error)
    if "couldn't connect" in text.lower() or "connection" in text.lower():
        return Problem(place, "is no local path, and the hub can't be reached", fix)
    if "gated" in text.lower():
        return Problem(place, "is gated", "accept its terms on its page, then log in: hf auth login")
    if "is not a local folder and is not a valid model identifier" in text:
        return Problem(place, "is neither a local path nor a model of the hub", fix)
    return Problem(place, f"can't be loaded from the hub: {_first_line(error)}", fix)


def _unknown_type(folder: Path) -> str | None:
    """The model type of the folder's config when transformers doesn't know it."""
    try:
        model_type = json.loads((folder / "config.json").read_text()).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    return str(model_type) if model_type not in CONFIG_MAPPING else None


def load_gguf(file: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a GGUF file, its weights dequantised to `dtype` on the CPU.

    Raises:
        UserError: the `gguf` package is missing, or the file can't be read.
    """
    from transformers import GgufConfig

    place = f"model: {file}"
    try:
        # Dequantised weights still count as quantised without the config, and then can't be saved.
        model = AutoModelForCausalLM.from_pretrained(
            str(file.parent),
            gguf_file=file.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=dtype,
            local_files_only=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
        remember_gguf_bits(model, file, model.config.get_text_config().num_hidden_layers)
    except ImportError as error:
        raise UserError(Problem(place, f"GGUF needs a package ({_first_line(error)})", "pip install gguf")) from error
    except (OSError, ValueError, LookupError, RuntimeError, struct.error) as error:
        raise UserError(Problem(place, f"can't be read as GGUF: {_first_line(error)}")) from error
    return model, tokenizer


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no advice while loading; errors still come through."""
    bars = transformers_logging.is_progress_bar_enabled()
    level = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
