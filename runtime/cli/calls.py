"""What the user calls a model, as a model and one or two calls of it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import UsageError

MODEL_HELP = (
    "a folder with a config.json, or such a file; a model type of transformers, such as qwen3 (at its full size: no"
    " weights are made); FILE.py:FACTORY, a function that returns (model, args) or (model, args, kwargs); or a FILE.pt2"
    " of torch.export"
)
_DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")}


@dataclass(frozen=True)
class Call:
    """One call of a model.

    Args:
        phase: "prefill", "decode", or "" where there is one kind of call only.
        model: what is called.
        args: its arguments.
        kwargs: likewise, by name.
    """

    phase: str
    model: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which model, and how it is called."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    shape = parser.add_argument_group("how a transformers model is built and called")
    shape.add_argument("--layers", type=int, metavar="N", help="only the first N layers")
    shape.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="of its weights (default: %(default)s)")
    shape.add_argument("--batch", type=int, default=1, metavar="N", help="sequences (default: %(default)s)")
    shape.add_argument("--tokens", type=int, default=512, metavar="N", help="of each sequence (default: %(default)s)")
    shape.add_argument(
        "--phase",
        choices=("prefill", "decode", "both"),
        default="both",
        help="decode is one token over a static cache of N tokens (default: %(default)s)",
    )


def calls(given: argparse.Namespace, device: str = "meta") -> list[Call]:
    """The model's calls.

    Args:
        given: the arguments of the command.
        device: where a model of transformers is built. On the meta device one of any size takes no memory and no time:
            shapes are all that a compilation asks for. Elsewhere its weights are random.

    Raises:
        UsageError: there is no such model, or it can't be built or called.
    """
    name = str(given.model)
    path, _, factory = name.rpartition(":")
    if given.layers is not None and (path.endswith(".py") or name.endswith(".pt2")):
        raise UsageError("--layers is for models of transformers")
    if path.endswith(".py"):
        return [_from_factory(Path(path), factory)]
    if name.endswith(".py"):
        raise UsageError(f"{name}: say which function of it returns the model: {name}:FUNCTION")
    if name.endswith(".pt2"):
        return [_exported(Path(name))]
    return _from_transformers(name, given, device)


def _from_factory(path: Path, name: str) -> Call:
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"{path} can't be imported: {type(error).__name__}: {error}") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UsageError(f"{path} has no function {name!r}; it has {', '.join(sorted(known)) or 'none'}")
    try:
        made = factory()
    except Exception as error:
        raise UsageError(f"{path}:{name} failed: {type(error).__name__}: {error}") from error
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
        raise UsageError(f"{path}:{name} must return (model, args) or (model, args, kwargs), not {type(made).__name__}")
    model, args, *kwargs = made
    if not isinstance(args, (tuple, list)):
        raise UsageError(f"{path}:{name}: args is to be a tuple of the model's arguments, not {type(args).__name__}")
    return Call("", model, args, *kwargs)


def _exported(path: Path) -> Call:
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    try:
        program = torch.export.load(path)
    except Exception as error:
        raise UsageError(f"{path} is no program of torch.export: {type(error).__name__}: {error}") from error
    if program.example_inputs is None:
        raise UsageError(f"{path} has no example inputs; export the model with them")
    args, kwargs = program.example_inputs
    return Call("", program.module(), args, kwargs)


def _from_transformers(name: str, given: argparse.Namespace, device: str) -> list[Call]:
    for option in ("batch", "tokens"):
        if getattr(given, option) < 1:
            raise UsageError(f"--{option} {getattr(given, option)}: at least one is needed")
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"{name!r} would be a model of transformers, which can't be imported ({error}): pip install transformers"
        ) from error
    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = _config(transformers, name)
    if given.layers is not None:
        _shorten(config, given.layers)
    kind = _class(transformers, config)
    with torch.device(device):
        try:
            model = kind._from_config(config, dtype=_DTYPES[given.dtype]).eval()
        except Exception as error:
            raise UsageError(f"{kind.__name__} can't be built from {name}: {type(error).__name__}: {error}") from error
        main_input = getattr(model, "main_input_name", "input_ids")
        if main_input == "pixel_values":
            vision = getattr(config, "vision_config", config)
            sizes = vision.image_size if isinstance(vision.image_size, (tuple, list)) else (vision.image_size,) * 2
            pixels = torch.rand(given.batch, vision.num_channels, *sizes, dtype=_DTYPES[given.dtype])
            return [Call("", model, (), {"pixel_values": pixels})]
        if main_input != "input_ids":
            raise UsageError(f"{kind.__name__} is called with {main_input}: give FILE.py:FACTORY, which makes the call")
        ids = torch.randint(config.get_text_config().vocab_size, (given.batch, given.tokens))
        both = {"decoder_input_ids": ids} if config.is_encoder_decoder else {}
        found = []
        if given.phase != "decode" or both:
            found.append(Call("prefill" if model.can_generate() else "", model, (), {"input_ids": ids, **both}))
        if given.phase != "prefill" and model.can_generate() and not both:
            cache = transformers.StaticCache(config=config, max_cache_len=given.tokens)
            found.append(Call("decode", model, (), {"input_ids": ids[:, :1], "past_key_values": cache}))
    if found and found[0].phase == "prefill" and model.can_generate() and not both:
        found[0] = Call("prefill", model, (), {**found[0].kwargs, "use_cache": False})
    return found


def _config(transformers: Any, name: str) -> Any:
    path = Path(name)
    if path.exists():
        folder = path if path.is_dir() else path.parent
        file = folder / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise UsageError(f"{folder} has no config.json")
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            return transformers.AutoConfig.for_model(**content)
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"{file} is no config of a model that transformers knows: {error}") from error
    try:
        return transformers.AutoConfig.for_model(name)
    except (ValueError, KeyError) as error:
        raise UsageError(
            f"{name!r} is neither a folder, nor a file, nor a model type that transformers {transformers.__version__}"
            f" knows; nothing is downloaded"
        ) from error


def _shorten(config: Any, layers: int) -> None:
    """Leaves the first layers; a list with an entry for each layer is cut to them."""
    text = config.get_text_config()
    depth = getattr(text, "num_hidden_layers", None)
    if not isinstance(depth, int):
        raise UsageError(f"a {config.model_type} config has no num_hidden_layers; leave --layers out")
    if not 1 <= layers <= depth:
        raise UsageError(f"--layers {layers}: the model has {depth}")
    text.num_hidden_layers = layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == depth:
            setattr(text, name, value[:layers])


def _class(transformers: Any, config: Any) -> Any:
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for family in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText", "AutoModel"):
        mapping = getattr(transformers, family)._model_mapping
        if type(config) in mapping:
            return mapping[type(config)]
    raise UsageError(f"transformers has no model for a {config.model_type} config")
