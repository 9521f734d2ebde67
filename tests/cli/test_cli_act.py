"""The commands that change something, against a real server on the real core."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest import mock

import msgspec
import pytest

from tests.support.cli_harness import Url, run
from tests.support.core.live import LiveEngine
from tests.support.routes import token_files
from tests.support.serving import Served, serve
from tests.support.waiting import LIMIT_S, until
from vtoken import wire


async def test_config_is_read_set_and_undone(url: Url, core: LiveEngine) -> None:
    shown = await run("config", "get", *url)
    assert "theta_f" in shown.out
    assert "0..1" in shown.out
    assert "\nexperiment " in shown.out
    assert "\nplanner " not in shown.out
    ran = await run(
        "config", "set", "theta_f=0.5", "experiment.planner=pack", "probe.every_steps=4", *url
    )
    assert ran.code == 0
    assert "theta_f: 0.25 -> 0.5" in ran.out
    assert core.runtime.config.experiment.planner == "pack"
    assert core.runtime.config.theta_f == 0.5
    assert core.runtime.config.probe.every_steps == 4
    assert (await run("undo", *url)).code == 0
    assert core.runtime.config.theta_f == 0.25
    config = (await run("config", "get", "--json", *url)).json(wire.ConfigDocument)
    assert isinstance(config, wire.ConfigDocument)
    assert config.revision == 3


@pytest.mark.usefixtures("stepping")
@pytest.mark.parametrize(
    ("command", "out", "state"),
    [
        ("config set theta_f=0.5", "theta_f: 0.25 -> 0.5", "applied"),
        ("resume", "reclamation: paused -> auto", "applied"),
        ("undo", "theta_f: 0.75 -> 0.25", "applied"),
        ("compact", "moved", "applied"),
        ("forget a 3 9", "6 more tokens of a die first", "applied"),
        ("config set theta_f=0.5", "", "not applied"),
        ("forget a 3 9", "", "not applied"),
    ],
)
async def test_change_whose_answer_is_lost_is_looked_up_and_told(
    served: Served, core: LiveEngine, command: str, out: str, state: str
) -> None:
    if command == "undo":
        core.call("patch_config", patch={"theta_f": 0.75})
    server, config = served.line, core.runtime.config
    server.answers_late, server.hangs = state == "applied", state != "applied"
    served.bus.timeout_s = 0.3
    changes = served.service.changes
    with mock.patch.object(changes, "outcome", wraps=changes.outcome) as lookup:
        running = asyncio.create_task(run(*command.split(), "--url", served.url))
        await until(lambda: lookup.called, "answered")
    server.answers_late = server.hangs = False
    served.bus.timeout_s = LIMIT_S
    ran = await running
    first, second, *rest = ran.err.splitlines()
    assert first.startswith("vtoken: the engine did not answer")
    assert "GET /vtoken/v1/changes/" in first
    assert second == "  looking it up …"
    if state == "applied":
        assert (ran.code, rest) == (0, [])
        assert out in ran.out
        assert command == "compact" or "was looked up: it is applied" in ran.out
    else:
        assert (ran.code, ran.out) == (1, "")
        assert rest[0].startswith("vtoken: nothing was done: the call reached the engine after")
        assert core.runtime.config is config
        assert core.runtime.requests.forgotten == {}


async def test_every_change_is_tried_out_with_a_token_that_only_reads(
    core: LiveEngine, tmp_path: Path
) -> None:
    files = token_files(tmp_path, read=True, control=True)
    async with serve(core.handle, **files) as served:
        server = ("--url", served.url)
        may_change = (*server, "--token-file", files["control_token_file"])
        trial = ("--confirm-within", "5m")
        assert (await run("config", "set", "theta_f=0.5", *trial, *may_change)).code == 0
        for command, told in (
            (("config", "set", "budget_tokens=32"), "\nevicts "),
            (("policy", "use", "streaming_llm"), "\nno difference now\n"),
            (("pause",), "nothing to change, revision 2"),
            (("resume",), "reclamation: paused -> auto"),
            (("undo",), "theta_f: 0.5 -> 0.25"),
            (("undo",), "it ends the trial of revision 2"),
            (("confirm",), "revision 2 would be confirmed and stay"),
            (("compact",), "Dry run over all requests: would move"),
        ):
            reads = (*server, "--token-file", files["read_token_file"])
            ran = await run(*command, "--dry-run", *reads)
            assert (ran.code, ran.err) == (0, "")
            assert told in ran.out
            meant = await run(*command, *reads)
            assert (meant.code, "this token is read-only" in meant.err) == (1, True)
    assert (core.runtime.revision, core.runtime.config.theta_f) == (2, 0.5)


async def test_change_says_whether_it_is_in_force_and_what_is_until_then(
    url: Url, core: LiveEngine
) -> None:
    step = core.runtime.step
    ran = await run("config", "set", "theta_f=0.5", *url)
    told = f"revision 2, in force from step {step + 1} on\n"
    assert told in ran.out
    shown = (await run("config", "get", *url)).out
    assert "revision 2, not in force yet: the newest step ran with revision 1" in shown
    assert "0.25 (set: 0.5)" in shown
    document = (await run("config", "set", "theta_f=0.75", "--json", *url)).json(wire.PatchResult)
    assert (document.outcome, document.overtaken, document.effective.theta_f) == (
        "accepted",
        2,
        0.25,
    )
    core.steps()
    shown = (await run("config", "get", *url)).out
    assert shown.startswith("revision 3\n")
    for request_id in ("a", "b"):
        core.finish(request_id)
    ran = await run("config", "set", "theta_f=0.1", *url)
    assert "revision 4, in force\n" in ran.out


async def test_a_policy_is_used_with_its_parameters(url: Url, core: LiveEngine) -> None:
    assert (await run("policy", "use", "streaming_llm", "sinks=2", *url)).code == 0
    assert core.runtime.config.policy.name == "streaming_llm"
    assert core.runtime.config.values().policy.params["sinks"] == 2


async def test_switch_says_what_becomes_of_the_scores(url: Url, core: LiveEngine) -> None:
    for arguments in (("tova", "--dry-run"), ("tova",)):
        ran = await run("policy", "use", *arguments, *url)
        assert "scores start anew: tova reads attention_last (" in ran.out
        assert ", until now it was no scores" in ran.out
    assert core.runtime.config.policy.name == "tova"


@pytest.mark.usefixtures("stepping")
async def test_compact_waits_for_the_result(served: Served) -> None:
    ran = await run("compact", "--request", "a", "--url", served.url)
    assert ran.code == 0
    assert ran.out.startswith("Compacted request a: moved ")


async def test_compact_that_does_not_come_to_an_end_fails(served: Served) -> None:
    ran = await run("compact", "--timeout", "0.1", "--url", served.url)
    assert ran.code == 1
    assert "still pending" in ran.err


async def test_forgotten_tokens_are_told_and_die_first(
    served: Served, url: Url, core: LiveEngine
) -> None:
    live = set(core.runtime.tables["a"].live_ids().tolist())
    ran = await run("forget", "a", "3", "9", "60", "99", *url)
    assert ran.code == 0
    assert ran.out.splitlines() == [
        "45 more tokens of a die first",
        f"forgotten: tokens 3-8, 60-98, {len(live & {*range(3, 9), *range(60, 99)})} of them live",
    ]
    shown = await run("request", "a", *url)
    assert "tokens 3-8, 60-98\n" in shown.out
    rows = (await run("request", "a", "--tokens", *url)).out.splitlines()
    assert [n for n, row in enumerate(rows) if row.endswith("forgotten")] == [
        *range(3, 9),
        *range(60, 99),
    ]
    core.configure(budget_tokens=40, interval_tokens=0)
    core.steps()
    died = live - set(core.runtime.tables["a"].live_ids().tolist())
    assert died == set(sorted(live & {*range(3, 9), *range(60, 99)})[: len(died)])
    entry = (await served.service.journal.entries(1)).entries[0]
    assert (entry.action, entry.changes["request_id"]) == ("forget", [None, "a"])
    assert entry.changes["spans"][1] == [[3, 9], [60, 99]]


async def test_parked_tokens_are_told_and_come_back(url: Url, core: LiveEngine) -> None:
    core.admit("p", 120)
    core.admit("short", 20)
    core.steps(3)
    assert (await run("restore", "short", *url)).out.splitlines() == [
        "short: 0 of 0 parked tokens come back now",
        "none of its tokens is parked",
    ]
    number = core.runtime.tables["p"].num_parked
    assert (await run("restore", "p", *url)).out.splitlines() == [
        f"p: 0 of {number} parked tokens come back now",
        "they come back once reclamation is resumed: it is paused",
    ]
    core.configure(reclamation="auto")
    ran = await run("restore", "p", "--dry-run", *url)
    assert ran.out.splitlines() == [
        f"p: 0 of {number} parked tokens would come back now",
        "they exceed its budget, and stay parked",
    ]
    core.configure(evict_when="pressure")
    ran = await run("restore", "p", *url)
    assert ran.code == 0
    assert ran.out.startswith(f"p: {number} of {number} parked tokens come back now")
    core.steps(5)
    assert core.runtime.tables["p"].num_dead == 0


async def test_text_to_forget_is_looked_up(core: LiveEngine) -> None:
    """The text of token n is the word n % 97; those of 41 to 43 are one character."""
    async with serve(core.handle, show_text=True) as served:
        url = ("--url", served.url)
        ran = await run("forget", "a", "--text", " w50 w51 w52", *url)
        assert (ran.code, core.runtime.requests.forgotten) == (0, {"a": ((50, 53),)})
        ran = await run("forget", "a", "--text", "0 w31 w", *url)  # only 31 lies in it entirely
        assert (ran.code, core.runtime.requests.forgotten) == (0, {"a": ((31, 32), (50, 53))})
        ran = await run("forget", "a", "--text", " 日", *url)
        assert core.runtime.requests.forgotten == {"a": ((31, 32), (41, 44), (50, 53))}
        for text, why in ((" w1", "occurs"), (" nowhere", "occurs 0 times"), ("31", "no token")):
            ran = await run("forget", "a", "--text", text, *url)
            assert (ran.code, why in ran.err) == (1, True)
    async with serve(core.handle) as served:
        ran = await run("forget", "a", "--text", " w50", "--url", served.url)
        assert (ran.code, "does not show the text" in ran.err) == (1, True)


async def test_what_to_forget_is_named_in_one_way(served: Served, core: LiveEngine) -> None:
    for wrong in ((), ("3",), ("3", "9", "--text", "w3")):
        ran = await run("forget", "a", *wrong, "--url", served.url)
        assert (ran.code, "START END" in ran.err) == (2, True)
    assert core.runtime.requests.forgotten == {}


async def test_a_request_has_the_name_that_its_client_gave_it(
    served: Served, core: LiveEngine
) -> None:
    engine_id, url = "chatcmpl-tenant/42/text-0a1b2c3d", ("--url", served.url)
    core.admit(engine_id, 40)
    core.steps(2)
    for name in ("tenant/42/text", "chatcmpl-tenant/42/text"):
        assert f" {engine_id}, running, " in (await run("request", name, *url)).out
        tokens = await run("request", name, "--tokens", *url)
        assert len(tokens.out.splitlines()) == core.runtime.tables[engine_id].num_tokens
        forgotten = await run("forget", name, "5", "6", *url)
        assert f"of {engine_id} die first" in forgotten.out
        entry = (await served.service.journal.entries(1)).entries[0]
        assert entry.changes["request_id"] == [None, engine_id]
        planned = await run("compact", "--request", name, "--dry-run", "--json", *url)
        assert planned.json(wire.Operation).request_id == engine_id


NAMES = "fastgen, h2o, keydiff, knorm, none, peak_attention, "


@pytest.mark.parametrize(
    ("command", "told", "in_full"),
    [
        ("config set theta_f=2", "theta_f = 2 is not a number in 0..1", "bound: a number in 0..1"),
        ("config set theta=2", "theta = 2 is not a known field\n  did you mean theta_f?\n", ", "),
        (
            "config set colour=2",
            "colour = 2 is not a known field: policy, theta_f, ",
            "field: colour",
        ),
        ("policy use tovaa", "unknown policy 'tovaa'\n  did you mean tova?\n", NAMES),
        ("policy use lru", f"unknown policy 'lru'\n  expected: one of {NAMES}", 'value: "lru"'),
        ("policy use keydiff recents=2", "did you mean recent?\n", "bound: fields: sinks, recent"),
        ("undo", "there is no earlier configuration\n", "(409 Nothing to undo)"),
        ("request r7", "no running request has the id 'r7', and none", "field: request_id"),
    ],
)
async def test_a_refusal_is_a_sentence_and_what_helps_and_v_has_the_rest(
    served: Served, command: str, told: str, in_full: str
) -> None:
    ran = await run(*command.split(), "--url", served.url)
    assert (ran.code, ran.out, told in ran.err) == (1, "", True)
    assert ("did you mean" in told) is ("did you mean" in ran.err)
    assert not any(word in ran.err for word in (in_full, "  field: ", "  bound: ", "(4"))
    verbose = await run(*command.split(), "-v", "--url", served.url)
    assert in_full in verbose.err
    assert told.splitlines()[-1] in verbose.err


async def test_a_refused_change_changes_nothing_and_is_a_problem_in_json(
    served: Served, core: LiveEngine
) -> None:
    assert (await run("config", "set", "theta_f=2", "batch_size=4", "--url", served.url)).code == 1
    assert core.runtime.config.batch_size == 32
    ran = await run("config", "set", "theta_f=2", "--json", "--url", served.url)
    problem = msgspec.json.decode(ran.err, type=wire.Problem)
    assert (problem.status, problem.field) == (422, "theta_f")


async def test_change_on_trial_says_what_ends_it_and_is_confirmed(
    url: Url, core: LiveEngine
) -> None:
    nothing = await run("confirm", *url)
    assert (nothing.code, "no change is on trial" in nothing.err) == (1, True)
    trial_flags = ("--confirm-within", "5m", "--guard", "preemptions>0")
    ran = await run("config", "set", "theta_f=0.5", *trial_flags, *url)
    assert ran.code == 0
    assert "revision 2 is on trial: reverted unless confirmed by" in ran.out
    assert "or if preemptions > 0" in ran.out
    trial = (await run("config", "get", "--json", *url)).json(wire.ConfigDocument).trial
    assert trial is not None
    assert trial.guards == [wire.Guard(metric="preemptions", above=0)]
    assert trial.expires_ts == pytest.approx(trial.started_ts + 300)
    confirmed = await run("confirm", *url)
    assert confirmed.out.startswith("revision 2 is confirmed and stays")
    assert (await run("config", "get", "--json", *url)).json(wire.ConfigDocument).trial is None
    assert core.runtime.config.theta_f == 0.5


async def test_a_guard_on_any_metric_reaches_the_engine_and_a_wrong_one_names_those_that_exist(
    url: Url,
) -> None:
    wrong = await run("config", "set", "theta_f=0.5", "--guard", "speed>3", *url)
    assert (wrong.code, "one of blocks, low_utilization_blocks" in wrong.err) == (1, True)
    unclear = await run("config", "set", "theta_f=0.5", "--guard", "f", *url)
    assert (unclear.code, "is not METRIC>NUMBER" in unclear.err) == (2, True)
    without_unit = await run("config", "set", "theta_f=0.5", "--guard-p95", "40", *url)
    assert (without_unit.code, "expected 40ms or 40s" in without_unit.err) == (2, True)
    off = await run(
        "config", "set", "theta_f=0.5", "--guard", "canary_agreement{group=evicting}<0.9", *url
    )
    assert (off.code, "has no value while canary.share is 0" in off.err) == (1, True)
    flags = ("--guard", "f>0.9", "--guard", "rate(generated_tokens)<0.5 over 60")
    flags += ("--guard", "preemptions>3", "--guard-p95", "0.04s")
    ran = await run("config", "set", "theta_f=0.5", *flags, *url)
    assert "reverted if f > 0.9, or if rate(generated_tokens) < 0.5 over 60 seconds" in ran.out
    trial = (await run("config", "get", "--json", *url)).json(wire.ConfigDocument).trial
    assert trial is not None
    assert trial.guards == [
        wire.Guard(metric="f", above=0.9),
        wire.Guard(metric="rate(generated_tokens)", below=0.5, min_count=60),
        wire.Guard(metric="preemptions", above=3),
        wire.Guard(
            metric="latency_seconds{kind=inter_token,quantile=0.95}",
            above=0.04,
            min_count=wire.GUARD_COUNT,
        ),
    ]


async def test_every_change_can_be_on_trial(served: Served) -> None:
    for command in (("policy", "use", "streaming_llm"), ("resume",), ("pause",)):
        ran = await run(*command, "--confirm-within", "90s", "--url", served.url)
        assert (ran.code, "on trial" in ran.out) == (0, True)
        assert (await run("confirm", "--url", served.url)).code == 0


async def test_misspelt_field_and_policy_get_a_suggestion(served: Served) -> None:
    for command, meant in (
        (("config", "set", "thetaf=0.5"), "theta_f"),
        (("config", "set", "experiment.planner=plugg"), "plug"),
        (("policy", "use", "streaming_lm"), "streaming_llm"),
    ):
        ran = await run(*command, "--url", served.url)
        assert (ran.code, ran.out) == (1, "")
        assert f"did you mean {meant}?" in ran.err


async def test_undo_and_confirm_name_the_revision_that_they_are_for(
    url: Url, core: LiveEngine
) -> None:
    await run("config", "set", "theta_f=0.5", "--confirm-within", "5m", *url)
    for command in ("undo", "confirm", "config set theta_f=0.6"):
        late = await run(*command.split(), "--if-revision", "1", *url)
        assert late.code == 1
        assert "the configuration is at revision 2, the call was made for 1" in late.err
    assert core.call("config").trial.revision == 2
    assert (await run("confirm", "--if-revision", "2", *url)).code == 0
    assert (await run("undo", "--if-revision", "2", *url)).code == 0
    assert core.runtime.config.theta_f == 0.25
