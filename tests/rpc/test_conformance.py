"""docs/rpc.md, tried out: a client of sockets and MessagePack alone, which imports no kvlease code.

The bytes that the document shows are taken from it and sent as they stand.
"""

import math
import re
import struct
import typing
from typing import Any

import pytest
import trio

from kvlease.services.serving.tenants import Tenant
from tests.rpc.raw import Raw, frame, unpack
from tests.rpc.rig import SECRET, Server, config_of, open_server, pack, until
from tests.tidy.rules import ROOT

DOCUMENT = (ROOT / "docs" / "rpc.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"^\| (\d+) \| `(\w+)` \| (.*?) \|", re.MULTILINE)


def example(name: str) -> bytes:
    """Return the bytes of one example of the document."""
    block = re.search(rf"```text {name}\n(.*?)```", DOCUMENT, re.DOTALL)
    assert block, name
    lines = [line.split("#")[0] for line in block.group(1).splitlines()]
    return bytes.fromhex("".join(lines))


def test_the_document_names_every_message_with_its_items_in_order() -> None:
    """A message, or an item of one, that the document leaves out or misplaces fails here."""
    import msgspec

    from kvlease.protocols import rpc

    documented = {int(n): (name, items) for n, name, items in NUMBER.findall(DOCUMENT)}
    kinds = [
        kind
        for kind in vars(rpc).values()
        if isinstance(kind, type) and issubclass(kind, rpc.Message) and kind is not rpc.Message
    ]
    found = {}
    for kind in kinds:
        names = ", ".join(f"`{field.name}`" for field in msgspec.structs.fields(kind))
        found[int(str(kind.__struct_config__.tag))] = (kind.__name__, names)
    assert documented == found
    for code in typing.get_args(rpc.Code):
        assert f"| `{code}` |" in DOCUMENT, code


def test_the_examples_are_what_kvlease_writes() -> None:
    from kvlease.protocols import rpc
    from kvlease.protocols.config import SamplingParams
    from kvlease.services.rpc.framing import frame_of

    assert bytes(frame_of(rpc.Ping(7))) == example("ping")
    greeting = rpc.Greeting("kvlease-rpc", 1, 1, bytes(range(32)), needs_secret=True)
    assert bytes(frame_of(greeting)) == example("greeting")
    tokens = rpc.Tokens([rpc.Piece(1, 0, struct.pack("<2i", 5, 300))])
    assert bytes(frame_of(tokens)) == example("tokens")
    generate = unpack(example("generate")[4:])
    assert generate == [16, 1, struct.pack("<3i", 1, 2, 3), {"max_tokens": 2}, 4096]
    import msgspec

    message = msgspec.msgpack.decode(example("generate")[4:], type=rpc.Generate)
    assert message.params == SamplingParams(max_tokens=2)


def test_the_proofs_are_those_of_the_document() -> None:
    """Nonces and MACs of the document's example, recomputed with the standard library."""
    import hmac

    values = dict(re.findall(r"^(secret|server nonce|client nonce|client mac|server mac)\s+(\S+)$",
                             DOCUMENT, re.MULTILINE))  # fmt: skip
    secret = values["secret"].encode()
    server, client = bytes.fromhex(values["server nonce"]), bytes.fromhex(values["client nonce"])
    signed = b"kvlease-rpc client\0" + server + client + b"\x01" + b"blue"
    assert hmac.digest(secret, signed, "sha256").hex() == values["client mac"]
    signed = b"kvlease-rpc server\0" + client + server
    assert hmac.digest(secret, signed, "sha256").hex() == values["server mac"]


async def tokens_of(raw: Raw, call: int) -> tuple[list[int], Any]:
    """Collect a call's tokens up to its last message; positions have to follow one another."""
    tokens: list[int] = []
    while True:
        message = await raw.receive()
        if message[0] == 32:
            for number, start, data, *_ in message[1]:
                if number == call:
                    assert start == len(tokens)
                    tokens += struct.unpack(f"<{len(data) // 4}i", data)
        elif message[0] in (33, 34) and message[1] == call:
            return tokens, message


@pytest.fixture
def tenants() -> tuple[Tenant, ...]:
    return (Tenant("blue", SECRET, b"salt", is_admin=True),)


async def shaken(server: Server) -> Raw:
    raw = await server.raw()
    welcome = await raw.shake(SECRET, "blue")
    assert welcome[0] == 2
    assert welcome[3:6] == ["null", 129280, 64]
    return raw


async def evict(raw: Raw, number: int, pages: int) -> None:
    """Ask for the eviction of all that begins with a 0 until just so many pages have gone.

    What a store or an answer still holds stays where it is, however often one asks.
    """
    while pages:
        await raw.send([23, number, pack([0]), None])
        kind, asked, gone = (await raw.receive_of(43))[:3]
        assert (kind, asked) == (43, number)
        assert gone <= pages
        pages -= gone
        number += 1


async def test_every_call_by_hand(tenants: tuple[Tenant, ...]) -> None:
    config = config_of(cache_events=100)
    async with open_server(config=config, tenants=tenants) as server:
        raw = await shaken(server)
        prompt = pack(range(200))
        with trio.fail_after(20):
            await raw.stream.send_all(example("ping"))
            assert await raw.receive() == [35, 7]
            await raw.send([28, 1, None, 1000])
            assert await raw.receive() == [48, 1, 0, [], 0]
            await raw.send([16, 2, prompt, {"max_tokens": 5, "ignore_eos": True}, 100, None])
            tokens, ended = await tokens_of(raw, 2)
            assert (len(tokens), ended[2], ended[3]["prompt"]) == (5, "length", 200)
            await raw.send([20, 3, prompt, "device"])
            assert (await raw.receive_of(40))[:3] == [40, 3, 192]
            await raw.send([21, 4, prompt, 60.0])
            _, _, pin, pinned = await raw.receive_of(41)
            assert pinned == 192
            await raw.send([22, 5, pin])
            assert await raw.receive_of(42) == [42, 5, True]
            await evict(raw, 100, 3)
            await raw.send([25, 7, True])
            assert (await raw.receive_of(45))[2]["ledger_ok"] is True
            await raw.send([26, 8])
            assert (await raw.receive_of(46))[2]["status"] == "serving"
            await raw.send([24, 9])
            assert await raw.receive_of(44) == [44, 9]
            await raw.send([18, 1])
            assert (await raw.receive_of(34))[:3] == [34, 1, "cancelled"]
            await raw.send([27, 10])
            assert await raw.receive_of(47) == [47, 10, 0]
            assert (await raw.receive_of(3))[:2] == [3, "draining"]
            assert await raw.receive() is None


async def test_credit_is_kept_to_the_token(tenants: tuple[Tenant, ...]) -> None:
    async with open_server(tenants=tenants) as server:
        raw = await shaken(server)
        with trio.fail_after(10):
            await raw.send([16, 1, pack([1, 2]), {"max_tokens": 50, "ignore_eos": True}, 7])
            got = 0
            while got < 7:
                got += sum(len(piece[2]) // 4 for piece in (await raw.receive_of(32))[1])
            assert got == 7
            await raw.send([19, 1])
            assert await raw.receive() == [35, 1]
            await raw.send([17, 1, 1000])
            while True:
                message = await raw.receive()
                if message[0] == 33:
                    break
                got += sum(len(piece[2]) // 4 for piece in message[1])
            assert got == 50


async def test_an_item_more_and_items_less_are_fine(tenants: tuple[Tenant, ...]) -> None:
    """Later versions add items at the end; what is left out has its default."""
    async with open_server(tenants=tenants) as server:
        raw = await shaken(server)
        with trio.fail_after(10):
            await raw.send([16, 1, pack([1]), {"max_tokens": 1, "later": 3}, 9, None, "later"])
            assert (await raw.receive_of(33))[2] == "length"
            await raw.send([16, 2, pack([1])])
            await raw.send([18, 2])
            assert (await raw.receive_of(33))[1:3] == [2, "cancelled"]


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        ([16, 1, b"abc", {}, 1], [34, 1, "bad_request"]),
        ([16, 1, b"abcd", {"max_tokens": 0}, 1], [34, 1, "bad_request"]),
        ([16, 1, "text", {}, 1], [34, 1, "bad_request"]),
        ([16, 1], [34, 1, "bad_request"]),
        ([20, 1, b"abcd", "attic"], [34, 1, "bad_request"]),
        ([21, 1, b"abcd", -1.0], [34, 1, "bad_request"]),
        ([21, 1, b"abcd", math.nan], [34, 1, "bad_request"]),
        ([21, 1, b"abcd", math.inf], [34, 1, "bad_request"]),
        ([16, -1, b"abcd"], [34, -1, "bad_request"]),
        ([25, 1 << 63], [34, 1 << 63, "bad_request"]),
        ([16, "one", b"abcd"], [3, "protocol"]),
        ([99, 1], [3, "protocol"]),
        ([2, 1], [3, "protocol"]),
        ({"call": 1}, [3, "protocol"]),
        (None, [3, "protocol"]),
    ],
)
async def test_a_wrong_message_is_refused_or_ends_the_connection(
    tenants: tuple[Tenant, ...], sent: object, answer: list[object]
) -> None:
    async with open_server(tenants=tenants) as server:
        raw = await shaken(server)
        with trio.fail_after(10):
            await raw.stream.send_all(frame(sent))
            assert (await raw.receive())[: len(answer)] == answer


@pytest.mark.parametrize("again", [[16, 1, pack([1])], [26, 1], [28, 1], [16, 1, "text"]])
@pytest.mark.parametrize("first", [[16, 1, pack([1]), {}, 0], [27, 1], [28, 1]])
async def test_a_number_that_is_taken_ends_the_connection(
    tenants: tuple[Tenant, ...], first: list[object], again: list[object]
) -> None:
    async with open_server(tenants=tenants, config=config_of(cache_events=9)) as server:
        raw, other = await shaken(server), await shaken(server)
        with trio.fail_after(10):
            await other.send([16, 1, pack([1]), {"max_tokens": 5, "ignore_eos": True}, 0])
            await until(lambda: server.service.num_streams)  # so that a drain takes its time
            await raw.stream.send_all(frame(first) + frame(again))
            assert (await raw.receive_of(3))[:2] == [3, "protocol"]
