"""Calls into the engine, between two steps: one struct a call, and the envelope that carries it.

API process and engine are of one release, so both have the same calls. Decoding a call checks
names, types and bounds against its struct. The engine checks what depends on the pool or a request.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vtoken.base.errors import RefusedError
from vtoken.wire import MAX_TRIAL_SECONDS, Guard
from vtoken.wire.bounds import fault

MAX_PAGE = 10_000

Natural = Annotated[int, Meta(ge=0, le=2**53)]
PageLimit = Annotated[int, Meta(ge=1, le=MAX_PAGE)]
TrialSeconds = Annotated[int, Meta(ge=1, le=MAX_TRIAL_SECONDS)]


class Call(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="op"):
    """Base of all calls; the tag is the call's name on the bus and in messages."""


class Describe(Call, tag="describe"):
    pass


class Status(Call, tag="status"):
    pass


class Config(Call, tag="config"):
    pass


class Policies(Call, tag="policies"):
    pass


class Frame(Call, tag="frame"):
    pass


class Blocks(Call, tag="blocks"):
    pass


class Block(Call, tag="block"):
    id: Natural


class Requests(Call, tag="requests"):
    pass


class Find(Call, tag="find"):
    """The requests that a client may mean by a name, see `vtoken.wire.request_names`."""

    name: str


class Request(Call, tag="request"):
    """`request_id`, also in the calls below: what the client calls the request."""

    request_id: str


class Tokens(Call, tag="tokens"):
    request_id: str
    start: Natural = 0
    limit: PageLimit = 256


class Text(Call, tag="text"):
    """A page of a request's text, as vocabulary ids."""

    request_id: str
    start: Natural = 0
    limit: PageLimit = 256


class Events(Call, tag="events"):
    """Events with a `seq` above `after`, or the newest; oldest first, of one kind or of all."""

    after: Natural | None = None
    limit: PageLimit = 256
    kind: str | None = None


class Operation(Call, tag="operation"):
    id: str


class History(Call, tag="history"):
    """What charts need of the last minutes, see `vtoken.wire.Point`."""


class Change(Call, tag="change"):
    """What became of the change that its caller named `id`."""

    id: str


class PatchConfig(Call, tag="patch_config"):
    """Apply a JSON merge patch atomically; `confirm_within_s` or a guard puts it on trial."""

    patch: dict[str, Any]
    if_match: Natural | None = None
    confirm_within_s: TrialSeconds | None = None
    guards: list[Guard] = []  # checked by the engine, see `vtoken.wire.guards`
    guard_for_s: TrialSeconds | None = None
    revision: Natural | None = None  # the change's number; None: the engine's next
    engines: list[Natural] = []  # that make the change together
    followers: list[Natural] = []  # that make it when its trial here has ended well

    @property
    def asks_for_trial(self) -> bool:
        """Whether it is to be tried first."""
        lasts = self.confirm_within_s, self.guard_for_s
        return bool(self.guards) or lasts != (None, None)


class Undo(Call, tag="undo"):
    if_match: Natural | None = None
    revision: Natural | None = None  # as of PatchConfig


class Confirm(Call, tag="confirm"):
    if_match: Natural | None = None


ConfigCall = PatchConfig | Undo | Confirm


class Validate(Call, tag="validate"):
    """Would the change be accepted now? It is refused as the change would be; else `Accepted`."""

    change: ConfigCall


class Preview(Call, tag="preview"):
    """What the change would do now."""

    change: ConfigCall


class Compact(Call, tag="compact"):
    request_id: str | None = None  # None: every request
    batch_size: int | None = None  # None: the configured B; bounded like the setting
    dry_run: bool = False


class Forget(Call, tag="forget"):
    """Let the tokens of `spans`, [start, end) of token ids, die before the request's others."""

    request_id: str
    spans: list[tuple[int, int]]


class End(Call, tag="end"):
    """End a session for its client."""

    request_id: str


class Restore(Call, tag="restore"):
    """Bring a request's parked tokens back without the wait; `dry_run`: report what would come."""

    request_id: str
    dry_run: bool = False


AnyCall = (
    Describe
    | Status
    | Config
    | Policies
    | Frame
    | Blocks
    | Block
    | Requests
    | Find
    | Request
    | Tokens
    | Text
    | Events
    | Operation
    | History
    | Change
    | PatchConfig
    | Undo
    | Confirm
    | Validate
    | Preview
    | Compact
    | Forget
    | End
    | Restore
)


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """One call, its actor, its deadline, and the id of a change."""

    call: AnyCall
    actor: str = "local"
    expires_ts: float | None = None  # the caller's timeout: do not execute the call after it
    change_id: str | None = None  # names a call that changes something, see `Change`

    @property
    def op(self) -> str:
        """The name of the call."""
        return name_of(type(self.call))


def name_of(kind: type[Call]) -> str:
    return str(kind.__struct_config__.tag)


CALLS: dict[str, type[Call]] = {name_of(kind): kind for kind in AnyCall.__args__}
_decoder = msgspec.msgpack.Decoder(Command)


def read_command(payload: bytes) -> Command:
    """The command in `payload`, msgpack as the bus carries it.

    Raises RefusedError: 400 for anything but a command, 422 for a value out of bounds.
    """
    try:
        return _decoder.decode(payload)
    except msgspec.ValidationError as error:
        raise _refusal(msgspec.msgpack.decode(payload), error) from None
    except msgspec.DecodeError as error:
        raise RefusedError(str(error), status=400, title="Bad command") from None


def _refusal(document: Any, error: msgspec.ValidationError) -> RefusedError:
    """The refusal of a command, naming the argument at fault."""
    call = document.get("call") if isinstance(document, dict) else None
    if not isinstance(call, dict):
        return RefusedError(str(error), status=400, title="Bad command")
    name = call.get("op")
    if name in (name_of(Validate), name_of(Preview)) and isinstance(call.get("change"), dict):
        call = call["change"]
        name = call.get("op")
    if not isinstance(name, str) or name not in CALLS:
        return RefusedError(
            f"unknown command {name!r}", field="op", value=name, bound=", ".join(CALLS), status=400
        )
    try:
        msgspec.convert(call, CALLS[name])
    except msgspec.ValidationError as wrong:
        refused = fault(wrong, call, CALLS[name])
        if refused.bound is not None and refused.bound.startswith("fields: "):
            return RefusedError(f"{name}: {refused.detail}", status=400, title="Bad command")
        return refused
    return RefusedError(str(error), status=400, title="Bad command")
