"""The Prometheus metrics of `/metrics`: values, names in docs and dashboard, no stale values."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import Response

from tests.support.cli_harness import parse
from tests.support.core.live import make_pressed, make_quiet
from tests.support.scripted import ScriptedEngine
from tests.support.serving import serve
from vtoken import wire
from vtoken.core.runtime.losses import kept_share
from vtoken_api import scrape
from vtoken_api.fanout import hub
from vtoken_api.metrics import FAMILIES, METRICS, PREFIX, Snapshot, exposition, full_name
from vtoken_api.plugin import VTokenEndpointPlugin

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "docs/grafana/vtoken.json").read_text())
NAME = re.compile(r"vllm:\w+")
PARTS = ("_bucket", "_sum", "_count")  # the samples of a histogram
OF_VLLM = {"vllm:request_queue_time_seconds_bucket"}


def families(text: str) -> dict[str, Any]:
    """The metric families by name, as Prometheus parses them; a family may appear only once."""
    parsed = list(text_string_to_metric_families(text))
    assert len({family.name for family in parsed}) == len(parsed)
    return {family.name: family for family in parsed}


async def scraped(http: httpx.AsyncClient) -> dict[str, Any]:
    answer = await http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["Content-Type"].startswith("text/plain")
    return families(answer.text)


async def test_every_metric_is_scraped_with_its_type_help_and_vllms_labels(
    engine: ScriptedEngine,
) -> None:
    async with serve(engine.handle) as served:
        await served.http.post("/vtoken/v1/undo", headers={"Host": "evil.example"})
        found = await scraped(served.http)
        assert set(found) == {PREFIX + metric.name for metric in METRICS}
        for metric in METRICS:
            family = found[PREFIX + metric.name]
            assert family.type == metric.kind
            assert family.documentation == metric.help
            for sample in family.samples:
                assert sample.name.removeprefix(full_name(metric)) in {"", *PARTS}
                assert set(sample.labels) - {"le"} == {"model_name", "engine", *metric.labels}
                assert (sample.labels["model_name"], sample.labels["engine"]) == ("scripted", "0")
        status = engine.status()
        blocks = {s.labels["state"]: s.value for s in found[PREFIX + "blocks"].samples}
        assert sum(blocks.values()) == status.blocks.total
        assert blocks["free"] == status.blocks.free
        (refused,) = found[PREFIX + "server_refused_calls"].samples
        assert (refused.labels["status"], refused.value) == ("403", 1.0)


async def test_prices_are_scraped_in_seconds(engine: ScriptedEngine) -> None:
    price = wire.Price(us=4.0, per="token", source="measured", samples=9)
    status = engine.status()
    status.prices = wire.RoundPrices(
        hole=price, copy=price, plan=price, saving_us=2_000_000, cost_us=1
    )
    status.reclamation.pack_us = 3_000_000
    text = exposition([Snapshot(status, None)], "m").decode()
    assert 'vllm:vtoken_price_seconds{engine="0",model_name="m",of="hole"} 4e-06' in text
    status.prices.hole = wire.Price(us=0.0, per="token", source="prior", samples=2)
    assert 'of="hole"' not in exposition([Snapshot(status, None)], "m").decode()
    assert 'vllm:vtoken_round_seconds{engine="0",model_name="m",side="saving"} 2.0' in text
    assert 'vllm:vtoken_pack_seconds_total{engine="0",model_name="m"} 3.0' in text


@pytest.mark.parametrize(
    ("slo", "line"),
    [
        (None, ""),
        (wire.Slo(text="itl<80ms", window_s=60.0), ""),
        (wire.Slo(text="itl<80ms", window_s=60.0, count=4, met=3, share=0.75), "0.75"),
    ],
)
def test_goodput_is_scraped_while_a_request_was_judged(
    engine: ScriptedEngine, slo: wire.Slo | None, line: str
) -> None:
    status = engine.status()
    status.slo = slo
    text = exposition([Snapshot(status, None)], "m").decode()
    assert text.count("vllm:vtoken_goodput_ratio{") == bool(line)
    assert not line or f'vllm:vtoken_goodput_ratio{{engine="0",model_name="m"}} {line}' in text


def test_the_canarys_figures_are_scraped_by_group(engine: ScriptedEngine) -> None:
    status = engine.status()
    status.canary = wire.CanaryStatus(
        count=20,
        agreement=0.9,
        control=wire.CanaryFigures(count=3, agreement=1.0),
        checked=23,
        skipped={"LoRA": 1, "session": 3},
    )
    text = exposition([Snapshot(status, None)], "m").decode()
    for name, labels, value in (
        ("agreement", 'group="evicting",model_name="m"', 0.9),
        ("agreement", 'group="control",model_name="m"', 1.0),
        ("window_requests", 'group="control",model_name="m"', 3.0),
        ("requests_total", 'model_name="m",outcome="checked"', 23.0),
        ("requests_total", 'model_name="m",outcome="skipped"', 4.0),
    ):
        assert f'vllm:vtoken_canary_{name}{{engine="0",{labels}}} {value}' in text
    assert "vllm:vtoken_canary_logprob_lost{" not in text  # nothing measured


def test_what_gave_way_is_scraped_and_every_request_that_ended_is_in_one_bucket() -> None:
    live = make_pressed()
    live.steps(40)
    text = exposition([Snapshot(live.reporter.status(), None)], "m").decode()
    found = families(text)
    pressure = live.reporter.status().pressure
    assert pressure is not None
    for name in ("short_blocks", "givers", "givable_tokens", "spared_tokens"):
        (sample,) = found[PREFIX + name].samples
        assert sample.value == getattr(pressure, name)
    for name in ("given_tokens", "preemptions_above_floor"):
        (sample,) = (s for s in found[PREFIX + name].samples if s.name.endswith("_total"))
        assert sample.value == getattr(pressure, name)
    assert pressure.given_tokens > 0
    live.steps(400)
    live.admit("alone", 20, max_tokens=40)
    live.steps(60)
    live.close()
    text = exposition([Snapshot(live.reporter.status(), None)], "m").decode()
    family = families(text)[PREFIX + "kept_share"]
    assert family.type == "histogram"
    buckets = [s for s in family.samples if s.name.endswith("_bucket")]
    counts = [s.value for s in buckets]
    assert counts == sorted(counts)
    assert [s.labels["le"] for s in buckets][-2:] == ["1.0", "+Inf"]
    sums = {s.name.rpartition("_")[2]: s.value for s in family.samples if s not in buckets}
    names = ["alone", *(f"r{i}" for i in range(12))]
    ended = [live.runtime.finished.get(name) for name in names]
    shares = [kept_share(one) for one in ended if one is not None]
    assert len(shares) == sums["count"] == counts[-1] == 13
    assert sums["sum"] == pytest.approx(sum(shares))
    for bucket in buckets:
        assert bucket.value == sum(share <= float(bucket.labels["le"]) for share in shares)
    assert 0 < counts[-3] < 13  # one lost tokens, one kept all


def test_no_metric_of_pressure_is_scraped_where_no_request_can_give() -> None:
    live = make_quiet()
    live.configure(policy={"name": "none"})
    text = exposition([Snapshot(live.reporter.status(), None)], "m").decode()
    live.close()
    assert "vllm:vtoken_given_tokens_total{" not in text
    assert "vllm:vtoken_kept_share_count{" not in text


def value(found: dict[str, Any], name: str) -> float | None:
    """Of a metric with one series; None if it is absent."""
    samples = found[PREFIX + name].samples
    return float(samples[0].value) if samples else None


async def test_engine_in_a_long_step_is_up_and_its_values_say_how_old_they_are(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape, "SCRAPE_S", 0.1)
    async with serve(engine.handle) as served:
        before = await scraped(served.http)
        assert value(before, "up") == 1
        assert (value(before, "age_seconds") or 0.0) <= hub.FRESH_S
        monkeypatch.setattr(hub, "FRESH_S", 0.0)  # the known values are too old
        served.line.hangs = True
        first, second = await scraped(served.http), await scraped(served.http)
        assert value(first, "up") == 1
        assert value(first, "pool_blocks") == value(before, "pool_blocks")
        ages = value(first, "age_seconds"), value(second, "age_seconds")
        assert scrape.SCRAPE_S <= (ages[0] or 0.0) <= (ages[1] or 0.0) - scrape.SCRAPE_S


def test_engine_that_has_not_answered_yet_is_up_without_values() -> None:
    found = families(exposition([Snapshot(None, None, age_s=None)], "m").decode())
    assert (value(found, "up"), value(found, "age_seconds")) == (1, None)


async def test_dead_engine_is_down_and_leaves_no_stale_value(engine: ScriptedEngine) -> None:
    async with serve(engine.handle) as served:
        await scraped(served.http)
        served.client.errored = True
        found = await scraped(served.http)
        assert value(found, "up") == 0
        shown = {name for name, family in found.items() if family.samples}
        assert all(name == PREFIX + "up" or "_server_" in name for name in shown)


async def test_what_the_host_server_shows_is_shown_as_it_was() -> None:
    app = FastAPI()

    @app.get("/metrics")
    def before(request: Request) -> Response:
        page = b"# HELP vllm:x X\n# TYPE vllm:x gauge\nvllm:x 1.0\n"
        return Response(page, media_type="text/plain")

    alone = app.routes[-1]
    scrape.attach(app, VTokenEndpointPlugin().metrics)
    app.routes.remove(alone)  # as vLLM does
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost"
    ) as http:
        assert set(await scraped(http)) == {"vllm:x"}


def test_names_follow_prometheus_rules() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert not metric.name.endswith("_total")
        assert metric.kind in FAMILIES
        assert not {"block", "request", "request_id", "id"} & set(metric.labels)
        assert metric.help


def expressions() -> list[str]:
    """Every PromQL expression of the dashboard."""
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    found += [note["expr"] for note in DASHBOARD["annotations"]["list"]]
    found += [v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    return found


def test_dashboard_shows_only_metrics_that_exist_and_most_of_them() -> None:
    named = {name for expr in expressions() for name in NAME.findall(expr)}
    ours = {name for name in named if name.startswith(PREFIX)}
    emitted = {full_name(metric) for metric in METRICS}
    parts = {full_name(m) + p for m in METRICS if m.kind == "histogram" for p in PARTS}
    assert ours <= emitted | parts
    assert len(ours - parts) > 0.6 * len(emitted)
    counters = {full_name(metric) for metric in METRICS if metric.kind == "counter"}
    for expr in expressions():
        for name in NAME.findall(expr):
            if name in counters | parts and "violations" not in name:
                assert f"rate({name}" in expr, expr


RULES = yaml.safe_load((ROOT / "docs/alerts/vtoken.rules.yml").read_text())["groups"]
ALERTS = {rule["alert"]: rule for group in RULES for rule in group["rules"]}


def test_no_two_alerts_have_one_name() -> None:
    assert len(ALERTS) == sum(len(group["rules"]) for group in RULES) >= 10


@pytest.mark.parametrize("rule", ALERTS.values(), ids=ALERTS)
def test_an_alert_is_on_metrics_and_labels_that_the_server_emits(rule: dict[str, Any]) -> None:
    emitted = {full_name(m) + part: m for m in METRICS for part in ("", *PARTS)}
    series = re.findall(r"(vllm:\w+)(?:\{(\w+)=\"(\w+)\"\})?", rule["expr"])
    ours = [found for found in series if found[0] not in OF_VLLM]
    assert series
    labels = [set(emitted[name].labels) for name, *_ in ours]
    for name, label, value_ in ours:
        if label:
            assert value_ in emitted[name].labels[label]
        rated = emitted[name].kind == "counter" or name != full_name(emitted[name])
        assert rated == bool(re.search(rf"(rate|increase)\({name}\[", rule["expr"])), name
    assert all(one == labels[0] for one in labels)  # else `and` and `/` join none


@pytest.mark.parametrize("rule", ALERTS.values(), ids=ALERTS)
def test_an_alert_says_how_long_how_grave_and_what_to_do_first(rule: dict[str, Any]) -> None:
    assert re.fullmatch(r"\d+m", rule["for"])
    assert rule["labels"]["severity"] in ("critical", "warning")
    notes = rule["annotations"]
    assert "$labels.instance" in notes["summary"]
    pages = re.findall(r"docs/[\w-]+\.md", notes["runbook"])
    assert pages
    assert not [page for page in pages if not (ROOT / page).exists()]
    for command in re.findall(r"`vtoken ([^`]+)`", notes["runbook"]):
        parse(shlex.split(command))


def test_dashboard_is_sane() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows[:3] == ["Pressure: who gives for what is short", "Is memory the limit?", "Why?"]
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "instance", "model_name", "engine"}
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")
            shown = '{instance=~"$instance",model_name=~"$model_name",engine=~"$engine"'
            assert target["expr"].count("vllm:") == target["expr"].count(shown)
            if "sum by" in target["expr"]:  # engines are not mixed
                assert "sum by (instance, engine, le)" in target["expr"]
            assert target["legendFormat"].endswith("{{instance}}/{{engine}}")
