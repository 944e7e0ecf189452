"""A DFlash-style draft: embeddings or tokens come in, sizes vary, weights change under way; all as eager has it."""

import copy
import random

import pytest
import torch
from torch import nn

from npu_fuse import GraphRunner, InputSpec

WIDTH, VOCABULARY, SLOTS, TOKENS = 16, 40, 30, 4
SPECS = {
    "input_ids": InputSpec("batch"),
    "positions": InputSpec("batch"),
    "slots": InputSpec("batch"),
    "input_embeds": InputSpec("batch"),
}


class Draft(nn.Module):
    """Attends to a block of tokens and to what its slot remembers; slot 0 is for padding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.rotary = nn.Embedding(64, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("memory", torch.zeros(SLOTS, WIDTH))

    def forward(self, input_ids, positions, slots, input_embeds=None):
        x = self.embed(input_ids) if input_embeds is None else input_embeds
        x = x + self.rotary(positions)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        y = nn.functional.scaled_dot_product_attention(q, k, v) + self.memory[slots][:, None]
        self.memory[slots] = y.mean(1)
        hidden = x + y
        return hidden, self.head(hidden).argmax(-1)


def steps(count, seed=0):
    chance = random.Random(seed)
    for _ in range(count):
        batch = chance.randint(1, 9)  # the largest bucket is 8
        call = {
            "input_ids": torch.randint(1, VOCABULARY, (batch, TOKENS)),
            "positions": torch.randint(0, 64, (batch, TOKENS)),
            "slots": 1 + torch.randperm(SLOTS - 1)[:batch],
        }
        if chance.random() < 0.5:
            call["input_embeds"] = torch.randn(batch, TOKENS, WIDTH)
        yield call


def assert_same(got, expected):
    torch.testing.assert_close(got[0], expected[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(got[1], expected[1])


def pair():
    model = Draft().eval()
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("poison", [False, True])
def test_a_thousand_random_steps_are_eagers(poison):
    model, eager = pair()
    runner = GraphRunner(model, buckets=[1, 2, 4, 8], inputs=SPECS, debug_poison=poison)
    kept = []
    with torch.no_grad():
        for call in steps(1000):
            got, expected = runner(**call), eager(**call)
            assert_same(got, expected)
            if len(kept) < 50:
                kept.append((got, expected))
    for got, expected in kept:
        assert_same(got, expected)
    # Slot 0 is written by padding alone.
    torch.testing.assert_close(model.memory[1:], eager.memory[1:], rtol=1e-4, atol=1e-5)
    assert runner.stats.captures == 8  # four sizes, with and without embeddings
    assert runner.stats.replays + runner.stats.eager == 1000
    assert runner.stats.eager > 50
    assert 0.1 < runner.stats.padded_share < 0.3


def halved(model):
    for parameter in model.parameters():
        parameter.mul_(0.5)


def data_replaced(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def assigned(model):
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)


def module_replaced(model):
    model.qkv = copy.deepcopy(model.qkv)
    halved(model.qkv)


def moved_to_and_fro(model):
    model.double().float()


def buffer_replaced(model):
    model.memory = model.memory * 0.5


def backup_kept(model):
    model.backup = [parameter.data for parameter in model.parameters()]  # so the old memory lives on
    data_replaced(model)


CHANGES = [halved, data_replaced, assigned, module_replaced, moved_to_and_fro, buffer_replaced, backup_kept]


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_weights_change_midway(change):
    model, eager = pair()
    runner = GraphRunner(model, buckets=[4, 8], inputs=SPECS)
    with torch.no_grad():
        for i, call in enumerate(steps(60)):
            if i in (20, 40):
                change(model)
                change(eager)
            assert_same(runner(**call), eager(**call))
    assert (runner.stats.recaptures > 0) == (change is not halved)


def test_the_ids_of_a_call_with_embeddings_are_not_those_of_the_one_before():
    model, eager = pair()
    runner = GraphRunner(model, buckets=[4], inputs=SPECS)
    calls = list(steps(40, seed=3))
    with_embeddings = next(call for call in calls if "input_embeds" in call and len(call["slots"]) < 4)
    without = next(call for call in calls if "input_embeds" not in call and len(call["slots"]) < 4)
    with torch.no_grad():
        for call in (without, with_embeddings, without, {**without, "input_embeds": None}, with_embeddings):
            assert_same(runner(**call), eager(**call))
    assert runner.stats.captures == 2
