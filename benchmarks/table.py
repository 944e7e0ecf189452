"""The results as tables: each model beside what peers find in it, totals, rows that differ and why, refusals."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kinds import HEADLINE, KINDS, true_sites
from peers import PEERS
from results import READS_NUMBERS, Count, Row, counts

__all__ = ["print_tables"]

Results = Mapping[str, Sequence[Row]]  # by device

WIDTH = 220  # of the widest table
REASONS = 5  # refusals shown of each kind


def print_tables(results: Results) -> int:
    """Print all tables; return 1 if a headline row differs without a note, or a row could not be measured."""
    console = Console(width=WIDTH, highlight=False)
    counted = [count for device, rows in results.items() for count in counts(device, rows)]
    unequal = [count for count in counted if count.found != count.true]
    for table in (per_model(results), totals(counted), beside_peers(results), differing(unequal), refusals(results)):
        if table.row_count:
            console.print(table)
    for device, rows in results.items():
        for row in rows:
            for peer, why in row.get("peer_failures", {}).items():
                console.print(f"{peer} failed: {row['model']} {row['phase']} on {device}: {why}", markup=False)
    left_out = ", ".join(f"{model} {phase}" for model, phase in sorted(READS_NUMBERS))
    console.print(f"Not run on the fake NPU, as their code reads numbers out of tensors between graphs: {left_out}.")
    errors = [f"{row['model']} {row['phase']} on {device}: {row['error']}" for device, row in failed(results)]
    for error in errors:
        console.print(Text(f"not measured: {error}", "red"))
    return int(bool(errors) or any(count.is_headline and count.note is None for count in unequal))


def failed(results: Results) -> Iterable[tuple[str, Row]]:
    return ((device, row) for device, rows in results.items() for row in rows if "error" in row)


def per_model(results: Results) -> Table:
    """A line for all phases and graphs of a model that are alike."""
    table = Table(
        title="Sites found/true; →n: n of them became an op, contracts refuse the rest; ?: nobody has counted them."
        " In blue what peers find. Last, how far float32 outputs are from eager's, as a part of the largest number",
        pad_edge=False,
    )
    table.add_column("model", no_wrap=True)
    table.add_column("graphs", max_width=40)
    for kind in _COLUMNS:
        table.add_column(kind)
    for peer in PEERS:
        table.add_column(peer, style="cyan", max_width=13)
    table.add_column("off by")
    for model in sorted({row["model"] for rows in results.values() for row in rows}):
        lines: dict[tuple[str, ...], list[tuple[str, str]]] = defaultdict(list)
        off = ""
        for device, rows in results.items():
            for row in rows:
                if row["model"] == model:
                    lines[_cells(row)].append((device, row["phase"]))
                    off = f"{row['difference']:.1g}" if "difference" in row else off
        for i, (cells, places) in enumerate(lines.items()):
            table.add_row(model if i == 0 else "", _graphs(places), *cells, off if i == 0 else "")
    return table


# Kinds that have more to them share a column with those that are told apart by it.
_COLUMNS: dict[str, list[str]] = defaultdict(list)
for _kind in KINDS:
    _COLUMNS[_kind.partition(":")[0]].append(_kind)


def _cells(row: Row) -> tuple[str, ...]:
    if "error" in row:
        return ("[red]failed[/]", *[""] * (len(_COLUMNS) + len(PEERS) - 1))
    sites = ("\n".join(filter(None, (_sites(row, kind) for kind in kinds))) for kinds in _COLUMNS.values())
    return (*sites, *(_found_by(row, peer) for peer in PEERS))


def _sites(row: Row, kind: str) -> str:
    true, found = true_sites(row["model"], row["phase"], kind), row["found"].get(kind, 0)
    if not true and not found:
        return ""
    lowered = row["lowered"].get(kind, 0)
    text = f"{found}/{'?' if true is None else true}" + (f"→{lowered}" if lowered != found else "")
    text += f" {kind.partition(':')[2]}"
    return text if true is None or found == true else f"[red]{text}[/]"


def _found_by(row: Row, peer: str) -> str:
    if peer in row["peer_failures"]:
        return "failed"
    return "\n".join(f"{count} {kind}" for kind, count in row["peers"].get(peer, {}).items() if count)


def _graphs(places: Iterable[tuple[str, str]]) -> str:
    """Phases by the devices they are alike on: "cpu npu: prefill decode"."""
    devices: dict[str, list[str]] = defaultdict(list)
    for device, phase in places:
        devices[phase].append(device)
    phases: dict[str, list[str]] = defaultdict(list)
    for phase, on in devices.items():
        phases[" ".join(on)].append(phase)
    return "; ".join(f"{on}: {' '.join(those)}" for on, those in phases.items())


def totals(counted: Sequence[Count]) -> Table:
    table = Table(title="Totals. A row is one kind of site in one model and phase", pad_edge=False)
    table.add_column("graphs")
    table.add_column("kind")
    for name in ("found / true", "lowered / found", "rows equal", "", "equal or explained", "too many in"):
        table.add_column(name, justify="right")
    for device in dict.fromkeys(count.device for count in counted):
        here = [count for count in counted if count.device == device]
        for kind in KINDS:
            if of_kind := [count for count in here if count.kind == kind]:
                table.add_row(device, kind, *_total(of_kind))
        headline = [count for count in here if count.is_headline]
        table.add_row(device, "+".join(HEADLINE), *_total(headline), style="bold", end_section=True)
    return table


def _total(rows: Sequence[Count]) -> tuple[str, ...]:
    found, equal = sum(row.found for row in rows), sum(row.found == row.true for row in rows)
    return (
        f"{found} / {sum(row.true for row in rows)}",
        f"{sum(row.lowered for row in rows)} / {found}",
        f"{equal} / {len(rows)}",
        f"{equal / len(rows):.1%}" if rows else "",
        str(sum(row.found == row.true or row.note is not None for row in rows)),
        str(sum(row.found > row.true for row in rows)),
    )


def beside_peers(results: Results) -> Table:
    """Sites of the headline's kinds in the phases that matter most."""
    table = Table(title="Sites found by npu_fuse and by peers, in the same graphs", pad_edge=False)
    for name in ("graphs", "kind", "true", "npu_fuse", *PEERS):
        table.add_column(name, justify="left" if name in ("graphs", "kind") else "right")
    for device, rows in results.items():
        for phase in ("prefill", "decode"):
            here = [row for row in rows if row["phase"] == phase and "error" not in row]
            for kind in HEADLINE:
                true = sum(true_sites(row["model"], phase, kind) or 0 for row in here)
                found = sum(row["found"].get(kind, 0) for row in here)
                by_peers = [str(sum(row["peers"].get(peer, {}).get(kind, 0) for row in here)) for peer in PEERS]
                table.add_row(f"{device} {phase}", kind, str(true), str(found), *by_peers)
            table.add_section()
    return table


def differing(unequal: Sequence[Count]) -> Table:
    """Rows whose count is not the true one; those of one model that say the same, as one."""
    table = Table(title="Where another number is found than the true one", pad_edge=False)
    for name in ("model", "graphs", "kind", "found/true", "why"):
        table.add_column(name)
    places: dict[tuple[str, str, str, str], list[tuple[str, str]]] = defaultdict(list)
    for count in unequal:
        why = "[red]not explained[/]" if count.note is None else count.note.why
        if count.note is not None and count.note.is_right:
            why = f"what is found is right: {why}"
        places[count.model, count.kind, f"{count.found}/{count.true}", why].append((count.device, count.phase))
    for (model, kind, numbers, why), where in sorted(places.items()):
        table.add_row(model, _graphs(where), kind, numbers, why)
    return table


def refusals(results: Results) -> Table:
    table = Table(title="Why recognised sites did not become an op", pad_edge=False)
    for name in ("graphs", "kind", "sites", "reason"):
        table.add_column(name)
    for device, rows in results.items():
        reasons: dict[str, Counter[str]] = defaultdict(Counter)
        for row in rows:
            for kind, found in row.get("refused", {}).items():
                reasons[kind].update(found)
        for kind, of_kind in reasons.items():
            for reason, sites in of_kind.most_common(REASONS):
                table.add_row(device, kind, str(sites), Text(reason))
            if rest := sum(of_kind.values()) - sum(sites for _, sites in of_kind.most_common(REASONS)):
                table.add_row(device, kind, str(rest), "others")
    return table
