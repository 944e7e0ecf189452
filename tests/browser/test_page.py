"""The page of a report as a browser shows it: what is listed, chosen, searched and hidden."""

import json
import re
from html import unescape
from pathlib import Path

import pytest

from browser.chromium import run
from npu_fuse import Report, Site

LAYERS = 1000


def report() -> Report:
    sites = []
    for layer in range(LAYERS):
        module = f"model.layers.{layer}"
        sites += [
            Site(
                "glu",
                "lowered",
                op="npu::npu_swiglu",
                module=f"{module}.mlp",
                source=f"{__file__}:3 in forward",
                params={"activation": "silu"},
                roundings=("the op rounds once",),
                before=(f"silu_{layer}: bf16[2, 8] = aten.silu.default(x)",),
                after=(f"swiglu_{layer}: bf16[2, 8] = npu.npu_swiglu.default(x)",),
            ),
            Site("add_rms_norm", "refused", reason="1 is added to the weight <b>here</b>", module=f"{module}.norm"),
        ]
    sites.append(Site("rope", "missed", reason="element 0 reads +x[4]", module="model.rotary"))
    return Report(sites, launches_before=372, launches_after=109, bytes_before=3151970, bytes_after=1134050)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(report().to_html(), encoding="utf-8")
    return path


def after(page: Path, script: str = "", at: str = "") -> dict:
    """What the page has in it, when a script has acted on it as a user would."""
    acting = page.with_name("acting.html")
    told = """
        const texts = selector => [...document.querySelectorAll(selector)].map(element => element.textContent);
        document.title = JSON.stringify({
          head: document.getElementById("head").textContent, main: document.getElementById("main").textContent,
          layers: texts("#layers summary > span:first-child"), sites: texts("#layers .site"), hash: location.hash,
          marked: texts("#main mark"), bold: texts("#main b").length, chips: texts(".chips button"),
        });
    """
    tail = f"<script>setTimeout(() => {{ {script}; setTimeout(() => {{ {told} }}, 200); }}, 200);</script></body>"
    acting.write_text(page.read_text(encoding="utf-8").replace("</body>", tail), encoding="utf-8")
    found = re.search(r"<title>(.*?)</title>", run(f"{acting.as_uri()}#{at}", "--dump-dom"), re.DOTALL)
    assert found is not None
    return json.loads(unescape(found[1]))


def test_at_first_an_overview_and_every_layer(page: Path) -> None:
    shown = after(page)
    assert shown["layers"] == [f"model.layers.{n}" for n in range(LAYERS)] + ["(outside of layers)"]
    assert shown["sites"] == [], "sites come when a layer is opened"
    assert "launches 372 → 109" in shown["head"]
    assert "moved 3.15 MB → 1.13 MB" in shown["head"]
    assert "1000add_rms_normrefused1 is added to the weight <b>here</b>" in shown["main"], "one line a reason"
    assert shown["bold"] == 0, "a reason is text, never markup"
    assert shown["chips"] == ["lowered 1000", "refused 1000", "missed 1", "glu 1000", "add_rms_norm 1000", "rope 1"]


def test_a_site_shows_the_models_line_what_was_and_what_is(page: Path) -> None:
    shown = after(page, at=f"site-{2 * 998}")
    assert "glu lowered as npu::npu_swiglu" in shown["main"]
    assert "silu_998: bf16[2, 8] = aten.silu.default(x)" in shown["main"]
    assert "swiglu_998: bf16[2, 8] = npu.npu_swiglu.default(x)" in shown["main"]
    assert "activationsilu" in shown["main"]
    assert "the op rounds once" in shown["main"]
    assert [mark.strip() for mark in shown["marked"]] == ["3  import json"]
    assert shown["sites"] == ["glumlp", "add_rms_normnorm"], "its layer is open, no other"


def test_a_click_on_a_layer_and_on_a_site(page: Path) -> None:
    click = "document.querySelectorAll('#layers summary')[7].click(); setTimeout(() => {"
    shown = after(page, click + "document.querySelectorAll('#layers .site')[1].click() }, 50)")
    assert shown["hash"] == f"#site-{2 * 7 + 1}"
    assert "1 is added to the weight <b>here</b>" in shown["main"]
    assert "model.layers.7.norm" in shown["main"]


def test_arrow_keys_go_from_site_to_site(page: Path) -> None:
    key = "document.body.dispatchEvent(new KeyboardEvent('keydown', {key: '%s', bubbles: true}))"
    assert after(page, key % "ArrowDown", at="site-4")["hash"] == "#site-5"
    assert after(page, key % "ArrowUp", at="site-4")["hash"] == "#site-3"


def test_search_and_filters_leave_what_fits(page: Path) -> None:
    box = "const box = document.getElementById('search')"
    search = f"{box}; box.value = '%s'; box.dispatchEvent(new Event('input'))"
    assert after(page, search % "ELEMENT 0 reads")["layers"] == ["(outside of layers)"]
    assert after(page, search % "layers.99 glu")["layers"] == [f"model.layers.{n}" for n in (99, *range(990, 1000))]
    assert after(page, search % "nothing of the kind")["layers"] == []
    hide = "const chips = document.querySelectorAll('.chips button'); chips[0].click(); chips[1].click()"
    assert after(page, hide)["layers"] == ["(outside of layers)"]
    assert len(after(page, f"{hide}; chips[1].click()")["layers"]) == LAYERS + 1


def test_an_empty_report_has_a_page_too(page: Path) -> None:
    empty = page.with_name("empty.html")
    empty.write_text(Report(remark="the graph needs gradients").to_html(), encoding="utf-8")
    assert "the graph needs gradients" in after(empty)["main"]
