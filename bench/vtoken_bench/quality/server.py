"""`vtoken serve` for the quality bench, and the requests to it: token ids in, token ids out.

One server serves all settings, because policy, budget and interval are part of a request. Prefix
caching is off, because a policy cannot score tokens that come from the prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from vtoken.client import Client
from vtoken.demo.server import Server, any_free_port
from vtoken_bench import forcing
from vtoken_bench.quality.measures import Top
from vtoken_bench.target import Target, as_flags

NUM_TOP = 50  # likeliest tokens of a position that are compared individually
BLOCK_SIZE = 16
REQUEST_S = 1800.0
STARTUP_S = {"cpu": 300.0, "cuda": 900.0}  # on CUDA the model is compiled once per version


class RequestError(RuntimeError):
    """The server refused a request; the message is its own."""


@dataclass(frozen=True)
class Completion:
    """`tops` and `chosen`: log-probabilities per generated token, before forcing."""

    ids: list[int]
    tops: list[Top]
    chosen: list[float]
    prompt: list[tuple[float, int]]  # log-probability and rank of prompt tokens, from the second on


class QualityServer:
    """Ready inside the `with` block; may be used by several threads."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        length: int,
        in_flight: int,
        calibration: Path | None,
        target: Target,
    ) -> None:
        """`length`: of the longest request [tokens], output included. `calibration`: a profile."""
        folder.mkdir(parents=True, exist_ok=True)
        tokens = in_flight * (length + BLOCK_SIZE)
        self.num_blocks = target.num_blocks(model, tokens, block_size=BLOCK_SIZE)
        self._server = Server(
            str(model),
            port=any_free_port(),
            arguments=arguments(
                target,
                model,
                num_blocks=self.num_blocks,
                length=length,
                in_flight=in_flight,
                calibration=calibration,
                state=folder / "state",
            ),
            log=folder / "server.log",
            environment=environment(target),
            startup_timeout_s=STARTUP_S[target.device],
        )
        self._http = httpx.Client(timeout=REQUEST_S, trust_env=False)
        self._chats: bool | None = None

    def __enter__(self) -> Self:
        self._server.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()
        self._server.__exit__(kind, error, trace)

    def configure(self, patch: dict[str, Any]) -> None:
        """Change the live configuration. Raises ProblemError."""
        with Client(self._server.url) as client:
            client.patch_config(patch)

    # ------------------------------------------------------------ tokens

    def has_chat_template(self) -> bool:
        if self._chats is None:
            try:
                self._tokens({"messages": [{"role": "user", "content": "Hello"}]})
                self._chats = True
            except RequestError:
                self._chats = False
        return self._chats

    def tokens(self, text: str) -> list[int]:
        return self._tokens({"prompt": text})

    def prompt(self, text: str, answer_prefix: str = "") -> list[int]:
        """`text` as the user's turn and the beginning of the answer to it, in the chat template.

        A model without a template gets both as plain text.
        """
        if not self.has_chat_template():
            return self.tokens(f"{text} {answer_prefix}".rstrip())
        messages = [{"role": "user", "content": text}]
        if not answer_prefix:
            return self._tokens({"messages": messages})
        messages.append({"role": "assistant", "content": answer_prefix})
        how = {"add_generation_prompt": False, "continue_final_message": True}
        return self._tokens({"messages": messages, **how})

    def text(self, ids: Sequence[int]) -> str:
        found: str = self._post("/detokenize", {"tokens": list(ids)})["prompt"]
        return found

    def _tokens(self, body: dict[str, Any]) -> list[int]:
        ids: list[int] = self._post("/tokenize", body)["tokens"]
        return ids

    # ------------------------------------------------------------ answers

    def complete(
        self,
        prompt: Sequence[int],
        num_new: int,
        arguments: Mapping[str, Any],
        *,
        forced: Sequence[int] = (),
        ignore_eos: bool = False,
        num_top: int | None = None,
        score_prompt: bool = False,
    ) -> Completion:
        """Generate greedily after the `forced` tokens. `score_prompt`: return `prompt`, too."""
        body: dict[str, Any] = {
            "prompt": list(prompt),
            "max_tokens": num_new,
            "temperature": 0,
            "repetition_penalty": 1.0,  # some models have another default
            "ignore_eos": ignore_eos,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "vllm_xargs": {**arguments, **({forcing.ARGUMENT: list(forced)} if forced else {})},
        }
        if num_top is not None:
            body["logprobs"] = num_top
        if score_prompt:
            body["prompt_logprobs"] = 0
        choice = self._post("/v1/completions", body)["choices"][0]
        found = choice["logprobs"]
        return Completion(
            choice["token_ids"],
            [] if found is None else [_top(top) for top in found["top_logprobs"]],
            [] if found is None else found["token_logprobs"],
            _prompt_scores(prompt, choice["prompt_logprobs"]) if score_prompt else [],
        )

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        try:
            answer = self._http.post(self._server.url + path, json={"model": "model", **body})
        except httpx.TransportError:
            self._server.check_alive()
            raise
        if answer.status_code != 200:
            raise RequestError(f"POST {path}: {answer.status_code} {answer.text[:500]}")
        return answer.json()


def arguments(
    target: Target,
    model: Path,
    *,
    num_blocks: int,
    length: int,
    in_flight: int,
    calibration: Path | None,
    state: Path,
) -> list[str]:
    """Flags of `vtoken serve`."""
    engine = target.engine_args(
        model,
        block_size=BLOCK_SIZE,
        max_model_len=length + 1,  # scoring a prompt generates one token
        num_blocks=num_blocks,
        max_num_seqs=in_flight,
        max_logprobs=NUM_TOP,
    )
    return [
        *as_flags(engine),
        f"--logits-processors={forcing.PROCESSOR}",
        "--served-model-name=model",
        "--vtoken-policy=none",
        f"--vtoken-calibration={calibration or 'off'}",
        f"--vtoken-state-dir={state}",
        *(["--vtoken-experimental-cuda"] if target.device == "cuda" else []),
    ]


def environment(target: Target) -> dict[str, str]:
    """Environment of the server."""
    found = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if target.threads is not None:
        found |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(target.threads)}
    return found


def _top(top: dict[str, float]) -> Top:
    """The NUM_TOP likeliest of `token_id:N` -> log-probability; vLLM may add the sampled token."""
    pairs = [(int(name.partition(":")[2]), logprob) for name, logprob in top.items()]
    return dict(sorted(pairs, key=lambda pair: -pair[1])[:NUM_TOP])


def _prompt_scores(prompt: Sequence[int], found: list[Any]) -> list[tuple[float, int]]:
    pairs = [position[str(token)] for token, position in zip(prompt[1:], found[1:], strict=True)]
    return [(pair["logprob"], pair["rank"]) for pair in pairs]
