import json
import socket
import threading

import pytest

from gradbench.sweep.local.channel import Channel


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with theirs:
        channel = Channel(ours)
        yield channel, theirs
        channel.close()


def test_messages_arrive_whole_however_they_were_cut(ends):
    channel, other = ends
    sent = [{"ended": "a·b", "result": {"n": n}} for n in range(3)]
    octets = b"".join(json.dumps(message).encode() + b"\n" for message in sent)
    received = []
    for n in range(len(octets)):
        other.sendall(octets[n : n + 1])
        received += channel.receive(10)
    assert received == sent


def test_a_message_may_be_larger_than_any_buffer(ends):
    channel, other = ends
    message, received = {"run": "x" * 2**21}, []
    sender = threading.Thread(target=Channel(other).send, args=(message,))
    sender.start()
    while not received:
        received += channel.receive(10)
    sender.join()
    assert received == [message]


def test_silence_is_no_death(ends):
    channel, other = ends
    assert channel.receive(0.01) == []
    other.sendall(b'{"half": ')
    assert channel.receive(10) == []
    other.close()
    assert channel.receive(10) is None


def test_what_a_dead_end_said_before_is_heard(ends):
    channel, other = ends
    channel.send({"never": "read"})  # so that the other's death is a reset, not an end
    other.sendall(b'{"last": "word"}\n')
    other.close()
    assert channel.receive(10) == [{"last": "word"}]
    assert channel.receive(10) is None
    channel.send({"to": "nobody"})
