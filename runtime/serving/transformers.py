"""transformers: a model whose `generate`, and every other call, is compiled, until it is switched off again.

    on = enable(model)
    model.generate(**inputs, max_new_tokens=100)
    print(on.report)
    on.disable()

`generate` compiles by itself on CUDA devices only, and no prompts. So the model's own `forward` is compiled instead,
once for prompts and once for single tokens, and `generate` gets a static cache where none is asked for. Between two
calls the cache is made ready: convolution states lie as the kernel's pool (`conv_state.adopt`), also after beam search
has made new ones, and tensors that stay where they are, are marked as such, by which replays find them.

Nothing but attributes of the given model is set, and transformers isn't imported.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ...passes.report import Report
from .. import conv_state
from ..backend import Backend
from ..options import Options

__all__ = ["Enabled", "enable"]

# How often one forward is compiled: prompts and continued ones, of one or several rows, with and without a mask or a
# cache, of one size and of any size. Beyond torch's default of 8 it would quietly run eagerly.
_MOST_GRAPHS = 64

# What is set on a model: by us, and by its `generate` with the first static cache.
_SET = ("forward", "generate", "_previous_max_cache_length")

_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
_CACHES = ("cache", "past_key_values")
_ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")

Forward = Callable[..., Any]


class Enabled:
    """A model whose calls are compiled. As a context manager, it is switched off at the end.

    Attributes:
        prefill: the backend of calls with several tokens, and of encoders; with `graphs`, of caches that grow as well.
        decode: the backend of calls with one token behind a cache.
    """

    def __init__(self, prefill: Backend, decode: Backend) -> None:
        self.prefill = prefill
        self.decode = decode
        self._before: list[tuple[nn.Module, dict[str, Any]]] = []

    @property
    def reports(self) -> list[Report]:
        """One report for each graph, those of prompts first."""
        return [*self.prefill.reports, *self.decode.reports]

    @property
    def report(self) -> Report:
        """All reports in one."""
        return Report.merged(self.reports)

    def disable(self) -> None:
        """Gives the model back as it was."""
        for module, attributes in self._before:
            for name in _SET:
                module.__dict__.pop(name, None)
            module.__dict__.update(attributes)
        self._before.clear()

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disable()

    def _set(self, module: nn.Module, **attributes: Any) -> None:
        own = {name: module.__dict__[name] for name in _SET if name in module.__dict__}
        self._before.append((module, own))
        module.__dict__.update(attributes)


def enable(
    model: nn.Module, options: Options | None = None, *, static_cache: bool = True, **settings: Any
) -> Enabled:
    """Compiles the calls of a model of transformers, on any device.

    Args:
        model: any model; of an encoder-decoder, both are compiled. Of what it holds only `forward` and `generate` are
            replaced, on the object itself.
        options: all settings in one; `graphs` are captured of single tokens only.
        static_cache: `generate` makes a static cache, unless it is called with a cache, its kind, `use_cache=False` or
            `output_attentions`, or is assisted (a static cache of a sliding window can't be cropped).
        settings: or single settings, by the names of `Options`.

    Returns:
        What has the reports, and switches it off again.

    Raises:
        TypeError: it is no model, such as the class of one.
        ValueError: it is switched on already, or a setting is unknown.
    """
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise TypeError(f"enable: give a model, as from_pretrained returns it, not {what}")
    if isinstance(model.__dict__.get("forward"), _Forward):
        raise ValueError(f"enable: {type(model).__name__} is switched on already; disable() what it returned first")
    decode = Backend(options, **settings)
    enabled = Enabled(Backend(replace(decode.options, graphs=None)), decode)
    attributes: dict[str, Any] = {"forward": _Forward(model.forward, enabled)}
    if static_cache and hasattr(model, "generate"):
        attributes["generate"] = _with_static_cache(model)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        encoder: Any = model.get_encoder()  # type: ignore[operator]  # nn.Module knows no methods of transformers
        enabled._set(encoder, forward=_Forward(encoder.forward, enabled))
    enabled._set(model, **attributes)
    return enabled


class _Forward:
    """The `forward` of a module, compiled, with its signature, which `generate` looks at."""

    def __init__(self, forward: Forward, enabled: Enabled) -> None:
        functools.update_wrapper(self, forward)
        self._forward = forward
        self._captures = enabled.decode.options.graphs is not None
        self._prefill, self._decode = (
            torch.compile(  # type: ignore[call-overload]  # its stubs lack two arguments
                forward, backend=backend, isolate_recompiles=True, recompile_limit=_MOST_GRAPHS
            )
            for backend in (enabled.prefill, enabled.decode)
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # part of a larger graph
            return self._forward(*args, **kwargs)
        caches = [single for name in _CACHES for single in _single_caches(kwargs.get(name))]
        for cache in caches:
            _make_ready(cache)
        is_decode = (
            _tokens(args, kwargs) == 1
            and any(map(_is_filled, caches))
            and (not self._captures or all(getattr(cache, "is_compileable", False) for cache in caches))
        )
        return (self._decode if is_decode else self._prefill)(*args, **kwargs)


def _single_caches(cache: Any) -> Iterator[Any]:
    """The caches in a cache: that of an encoder-decoder has two."""
    if hasattr(cache, "self_attention_cache"):
        yield from (cache.self_attention_cache, cache.cross_attention_cache)
    elif hasattr(cache, "layers"):
        yield cache


def _is_filled(cache: Any) -> bool:
    return all(
        getattr(layer, "is_initialized", False) or any(getattr(layer, "is_conv_states_initialized", {}).values())
        for layer in cache.layers
    )


def _make_ready(cache: Any) -> None:
    """What is to be done to a cache after a prompt has filled it, and after its tensors were replaced."""
    conv_state.adopt(cache)
    for layer in cache.layers:
        if getattr(layer, "is_compileable", False):
            for tensor in _tensors(vars(layer)):
                if not hasattr(tensor, "_dynamo_static_input_type"):
                    torch._dynamo.mark_static_address(tensor)


def _tensors(attributes: Mapping[Any, Any]) -> Iterator[torch.Tensor]:
    for value in attributes.values():
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value)


def _tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """How many tokens a call computes, if it says so by name, or by its first argument."""
    inputs = (*(kwargs.get(name) for name in _INPUTS), *args[:1])
    return next((value.shape[1] for value in inputs if isinstance(value, torch.Tensor)), None)


def _with_static_cache(model: Any) -> Forward:
    """The model's `generate`, with a static cache where nothing else is asked for."""
    generate: Forward = model.generate

    signature = inspect.signature(generate)

    @functools.wraps(generate)
    def with_static_cache(*args: Any, **kwargs: Any) -> Any:
        kwargs.update(signature.bind_partial(*args).arguments)
        given = kwargs.get("generation_config")

        def asked(name: str) -> Any:
            levels = (kwargs.get(name), getattr(given, name, None), getattr(model.generation_config, name, None))
            return next((value for value in levels if value is not None), None)

        others = any(asked(name) is not None for name in (*_CACHES, *_ASSISTED, "cache_implementation"))
        if others or asked("use_cache") is False or asked("output_attentions") or asked("is_assistant"):
            return generate(**kwargs)
        if given is None:
            return generate(**kwargs, cache_implementation="static")
        kwargs["generation_config"] = copy.deepcopy(given)
        kwargs["generation_config"].cache_implementation = "static"
        return generate(**kwargs)

    return with_static_cache
