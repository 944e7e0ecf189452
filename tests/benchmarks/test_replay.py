"""The benchmark of replays measures what it says."""

import json

import replay


def test_every_way_is_timed_and_kept(tmp_path, capsys):
    replay.main(["--layers", "1", "2", "--inputs", "2", "--rounds", "1", "--json", str(tmp_path / "replay.json")])
    kept = json.loads((tmp_path / "replay.json").read_text())
    assert [(row["layers"], row["inputs"]) for row in kept["microseconds"]] == [(1, 2), (2, 2)]
    for row in kept["microseconds"]:
        assert all(row[way] > 0 for way in ("replay", "padded", "copies", "guards", "eager"))
    assert "layers" in capsys.readouterr().out


def test_hollow_graphs_do_nothing():
    model = replay.Model(1).eval().requires_grad_(False)
    x, y = replay.torch.randn(2, 4, replay.WIDTH)
    runner = replay.GraphRunner(model, backend=replay.Hollow())
    assert not replay.torch.allclose(runner(x, y), model(x, y))
