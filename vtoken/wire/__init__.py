"""The wire format: every document and stream message that leaves the engine, as msgspec structs.

The engine fills these structs, the API forwards them, the console and the CLI read them. Within
schema 1 fields may be added, never renamed or removed. Units are suffixes:
`_tokens _blocks _slots _bytes _ms _us _ratio`; times are Unix seconds.

Arrays are packed: little-endian bytes in msgpack, a list of integers in JSON (`pack_array`,
`unpack_array`).

Other packages import every name from here. Inside, a module imports only modules before it: `doc`,
`settings`, `status`, `documents`, then `bus` and `stream`, then `recording`.
"""

from vtoken.wire.bus import *
from vtoken.wire.doc import *
from vtoken.wire.documents import *
from vtoken.wire.recording import *
from vtoken.wire.settings import *
from vtoken.wire.status import *
from vtoken.wire.stream import *
