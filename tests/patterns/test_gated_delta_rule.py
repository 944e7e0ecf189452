"""The gated delta rule token by token: found with all that it reads, repeated bit for bit, and left as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from helpers import Compiled, compiled, repeats
from npu_fuse.patterns.match import Match

Tensor = torch.Tensor
B, H, K, V = 2, 4, 6, 10


def drawn(tokens: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """query, key, value, the logarithm of the decay, beta, and the state."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(B, H, tokens, K), (B, H, tokens, K), (B, H, tokens, V), (B, H, tokens), (B, H, tokens), (B, H, K, V)]
    q, k, v, g, beta, state = (torch.randn(shape, generator=generator) for shape in shapes)
    return [x.to(dtype) for x in (q, k, v, -g.abs(), beta.sigmoid(), state)]


def by_broadcasting(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """As transformers spells it."""
    out = torch.zeros_like(v)
    for i in range(k.shape[2]):
        q_t, k_t, v_t = q[:, :, i], k[:, :, i], v[:, :, i]
        state = state * g[:, :, i].exp().unsqueeze(-1).unsqueeze(-1)
        known = (state * k_t.unsqueeze(-1)).sum(dim=-2)
        delta = (v_t - known) * beta[:, :, i].unsqueeze(-1)
        state = state + k_t.unsqueeze(-1) * delta.unsqueeze(-2)
        out[:, :, i] = (state * q_t.unsqueeze(-1)).sum(dim=-2)
    return out, state


def turned_round(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Every sum and product the other way round."""
    out = []
    for q_t, k_t, v_t, g_t, b_t in zip(q.unbind(2), k.unbind(2), v.unbind(2), g.unbind(2), beta.unbind(2), strict=True):
        state = g_t[..., None, None].exp() * state
        delta = b_t[..., None] * (v_t - (k_t[..., None] * state).sum(2))
        state = delta[..., None, :] * k_t[..., None] + state
        out.append((q_t[..., None] * state).sum(-2))
    return torch.stack(out, 2), state


def without_decay(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    k_t = k[:, :, 0].unsqueeze(-1)
    delta = (v[:, :, 0] - (state * k_t).sum(-2)) * beta[:, :, 0, None]
    state = state + k_t * delta.unsqueeze(-2)
    return (state * q[:, :, 0].unsqueeze(-1)).sum(-2)[:, :, None], state


SPELLINGS = {f.__name__: f for f in (by_broadcasting, turned_round, without_decay)}


def found_in(function: Callable[..., object], *inputs: Tensor) -> tuple[Compiled, list[Match]]:
    found = compiled(function, *inputs)
    return found, found.findings().of("gated_delta_rule")


def simulated(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, each head and token on its own, by matrix products."""
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state.clone()))
    out = torch.zeros_like(v)
    for b in range(B):
        for h in range(H):
            for t in range(k.shape[2]):
                s = state[b, h] * g[b, h, t].exp()
                error = v[b, h, t] - k[b, h, t] @ s
                state[b, h] = s + beta[b, h, t] * torch.outer(k[b, h, t], error)
                out[b, h, t] = q[b, h, t] @ state[b, h]
    return out, state


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("tokens", [1, 3])
def test_each_token_is_found(name: str, tokens: int) -> None:
    tokens = 1 if name == "without_decay" else tokens
    inputs = drawn(tokens)
    if name == "without_decay":
        inputs[3].zero_()
    found, matches = found_in(SPELLINGS[name], *inputs)
    assert len(matches) == tokens
    assert all(repeats(match, found.values()) for match in matches)
    p = matches[0].params
    assert (p.heads, p.key_dim, p.value_dim, p.state_dtype) == (H, K, V, torch.float32)
    assert p.decay == (name != "without_decay")
    assert matches[0].inputs["state"].op == "placeholder"
    for ours, wanted in zip(found.output, simulated(*inputs), strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-4, atol=1e-5)
    sites = [site for site in found.report.sites if site.kind == "gated_delta_rule"]
    assert [site.status for site in sites] == ["refused"] * tokens
    assert "its state (2, 4, 6, 10) is float32 with keys before values" in sites[0].reason


Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def step(
    known: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda s, k, q: (s * k).sum(-2),
    delta: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda v, known, beta: (v - known) * beta,
    asked: Callable[[Tensor, Tensor], Tensor] = lambda s, q: (s * q).sum(-2),
    added: Callable[[Tensor, Tensor], Tensor] = lambda s, outer: s + outer,
) -> Step:
    """One token, with one part of it otherwise."""

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        q, k = q[:, :, 0, :, None], k[:, :, 0, :, None]
        state = state * g[:, :, 0, None, None].exp()
        error = delta(v[:, :, 0], known(state, k, q), beta[:, :, 0, None])
        return asked(added(state, k * error[:, :, None]), q)

    return run


def test_a_step_with_nothing_otherwise_is_one() -> None:
    assert len(found_in(step(), *drawn(1))[1]) == 1


OTHERS: dict[str, Step] = {
    "another key is asked for": step(known=lambda s, k, q: (s * q).sum(-2)),
    "another state is asked": step(known=lambda s, k, q: (s * 2 * k).sum(-2)),
    "the difference is the other way round": step(delta=lambda v, known, beta: (known - v) * beta),
    "no beta": step(delta=lambda v, known, beta: v - known),
    "beta of the value alone": step(delta=lambda v, known, beta: v * beta - known),
    "a fraction of the difference": step(delta=lambda v, known, beta: torch.sub(v, known, alpha=0.5) * beta),
    "nothing is known": step(delta=lambda v, known, beta: v * beta),
    "the largest in place of the sum": step(asked=lambda s, q: (s * q).amax(-2)),
    "the sum is kept as an axis": step(asked=lambda s, q: (s * q).sum(-2, keepdim=True)),
    "added by half": step(added=lambda s, outer: torch.add(s, outer, alpha=0.5)),
    "subtracted": step(added=lambda s, outer: s - outer),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_otherwise_is_none(name: str) -> None:
    assert not found_in(OTHERS[name], *drawn(1))[1]
