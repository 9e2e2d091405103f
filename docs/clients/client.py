"""A complete client with pyzmq and msgpack alone: python client.py ADDRESS PROMPT"""

import sys

import msgpack
import zmq

address, prompt = sys.argv[1:3]
socket = zmq.Context().socket(zmq.DEALER)
socket.setsockopt(zmq.LINGER, 0)
socket.connect(address)


def send(**message):
    socket.send(msgpack.packb(message))


def receive():
    if not socket.poll(10_000):
        sys.exit("no word from the server for 10 s")
    return msgpack.unpackb(socket.recv())


send(type="hello", version=1)
welcome = receive()
if welcome["type"] != "welcome":
    sys.exit(welcome["message"])
sampling = {"temperature": 0.0, "max_tokens": 32}
send(type="generate", id="1", prompt=prompt, sampling=sampling)

received = 0  # output tokens
while True:
    message = receive()
    if message["type"] == "chunks":
        for chunk in message["items"]:  # none: the server only looks whether we are there
            if chunk["id"] != "1" or chunk["offset"] < received:
                continue
            received = chunk["offset"] + len(chunk["ids"])
            print(chunk["text"], end="", flush=True)
    elif message["type"] == "done":
        print()
        print(message["finish_reason"], message["usage"], file=sys.stderr)
        break
    elif message["type"] == "error":
        sys.exit(f"{message['code']}: {message['message']}")
