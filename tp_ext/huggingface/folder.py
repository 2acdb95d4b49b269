"""The files of a folder of transformers, which need not be trusted: what they say is checked before it is used."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from tp_ext.checkpoint.files.plain_values import read_json
from tp_ext.checkpoint.files.safetensors_slices import SlicedTensor
from tp_ext.checkpoint.files.saved_dtypes import check_saved_dtype, is_plain_float, refuse_quantised
from tp_ext.checkpoint.safetensors_files import open_export

CONFIG = "config.json"
OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.gguf")  # of weights


def class_of(path: Path, model_class: type[transformers.PreTrainedModel] | None) -> type[transformers.PreTrainedModel]:
    """Returns the class asked for, or else the configuration's."""
    if not path.is_dir():
        advice = "huggingface_hub.snapshot_download makes one"
        raise FileNotFoundError(f"path: {str(path)!r} must be a folder here, with config.json; {advice}")
    names = read_json(path / CONFIG).get("architectures")
    if model_class is not None:
        return model_class
    if not (isinstance(names, list) and names and isinstance(names[0], str)):
        raise ValueError(
            f"path: {str(path / CONFIG)!r} has architectures {names!r}, which must be a list of names; or pass "
            "model_class="
        )
    cls = getattr(transformers, names[0], None)
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise ValueError(f"path: {str(path)!r} is of the class {names[0]!r}; pass model_class=, one of transformers")
    return cls


def check_config(config: transformers.PreTrainedConfig, path: Path, overrides: Mapping[str, Any]) -> None:
    """Raises ValueError for values of a file, or of a part such as the text model's, that make transformers read
    weights in another way or load code from a hub."""
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    for part in parts:
        if any(getattr(part, name, None) is not None for name in ("quantization_config", "compression_config")):
            raise ValueError(f"path: {str(path)!r} has quantized weights, and must be saved without quantization")
        for name in ("attn_implementation", "experts_implementation"):
            value = getattr(part, f"_{name}", None)
            if value is not None and "/" in str(value) and name not in overrides:
                raise ValueError(
                    f"path: {str(path / CONFIG)!r} has {name} {value!r}, code of a hub, which must be given by {name}="
                )


def load_generation_config(model: transformers.PreTrainedModel, path: Path) -> None:
    """Reads ``generation_config.json``, if there is one."""
    file = path / "generation_config.json"
    if model.can_generate() and file.exists():
        read_json(file)
        with of_file(file, "GenerationConfig"):
            model.generation_config = transformers.GenerationConfig.from_pretrained(str(path), local_files_only=True)


@contextmanager
def of_file(file: Path, name: str) -> Iterator[None]:
    """Names the file in errors of transformers about its values, such as a KeyError of an unknown activation."""
    try:
        yield
    except Exception as error:
        # Those of validators are lists, and those of torch have a stack of C++
        words = " ".join(str(error).partition("Exception raised from")[0].split())
        raise ValueError(
            f"path: {str(file)!r} must describe a {name}; transformers: {type(error).__name__}: {words}"
        ) from error


def files_of(path: Path, opened: ExitStack) -> dict[str, SlicedTensor]:
    """Opens the safetensors files; FileNotFoundError names the files of other formats that are there instead."""
    try:
        return open_export(path, opened)[0]
    except FileNotFoundError as error:
        # training_args.bin is Trainer's, and has no weights
        others = sorted({file.name for kind in OTHER_FORMATS for file in path.glob(kind)} - {"training_args.bin"})
        if not others or list(path.glob("*.safetensors*")):
            raise
        raise FileNotFoundError(
            f"{error}; it has {others}, which are not read: load them by transformers once, whose save_pretrained "
            "writes safetensors"
        ) from None


def refuse_quantised_files(files: Mapping[str, SlicedTensor], model: transformers.PreTrainedModel, path: Path) -> None:
    """Raises ValueError if the files hold codes of quantised weights, before they are matched with the model: patterns
    of weights that are converted may fit scales, too."""
    where, state = f"path: {str(path)!r}", model.state_dict()
    refuse_quantised(files, state, where)
    own = {tensor.dtype for tensor in state.values()}
    for name, tensor in files.items():
        if (dtype := tensor.dtype).is_floating_point and not is_plain_float(dtype) and dtype not in own:
            check_saved_dtype(name, dtype, torch.float32, where)
