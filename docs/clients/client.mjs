// A complete client for Node.js: npm install zeromq @msgpack/msgpack; node client.mjs ADDRESS PROMPT
import { decode, encode } from "@msgpack/msgpack";
import { Dealer } from "zeromq";

const [address, prompt] = process.argv.slice(2);
const socket = new Dealer({ linger: 0, receiveTimeout: 10_000 });
socket.connect(address);

const send = (message) => socket.send(encode(message));
const receive = async () => decode((await socket.receive())[0]);

const fail = (words) => {
  console.error(words);
  process.exit(1);
};

await send({ type: "hello", version: 1 });
const welcome = await receive();
if (welcome.type !== "welcome") fail(welcome.message);
const sampling = { temperature: 0, max_tokens: 32 };
await send({ type: "generate", id: "1", prompt, sampling });

let received = 0; // output tokens
for (;;) {
  const message = await receive();
  if (message.type === "chunks") {
    for (const chunk of message.items) {
      // none: the server only looks whether we are there
      if (chunk.id !== "1" || chunk.offset < received) continue;
      received = chunk.offset + chunk.ids.length;
      process.stdout.write(chunk.text);
    }
  } else if (message.type === "done") {
    process.stdout.write("\n");
    console.error(message.finish_reason, message.usage);
    break;
  } else if (message.type === "error") {
    fail(`${message.code}: ${message.message}`);
  }
}
socket.close();
