// Perfetto's trace processor, as its UI brings it, behind a Unix socket: bytes in, bytes out, in
// the protocol that perfetto's Python package speaks.
//
//     node trace_processor.mjs UI_FOLDER SOCKET
//
// The bundle is made for a web worker, so it finds here what it looks for in one: `self`, a
// synchronous request for its WebAssembly program, and an `onmessage` to be handed a port.
import { readFileSync } from "node:fs";
import { createServer } from "node:net";
import { join } from "node:path";
import vm from "node:vm";

const [folder, socketPath] = process.argv.slice(2);

class XMLHttpRequest {
  open(_method, name) {
    this.name = name;
  }
  send() {
    this.response = local(readFileSync(join(folder, this.name))).buffer;
  }
}

const scope = vm.createContext({
  console: { log: console.error, warn: console.error, error: console.error },
  TextDecoder,
  URL,
  WorkerGlobalScope: class {},
  XMLHttpRequest,
  location: { href: "file:///" },
  performance,
});
scope.self = scope;
// The bundle tells arrays of its own world from others, so what it is given has to be one of them.
const local = vm.runInContext("bytes => Uint8Array.from(bytes)", scope);

process.on("uncaughtException", (error) => {
  // Node would show the line that failed: with a bundle, that is all of it.
  console.error(error.stack.split("\n").filter((line) => line.length < 200).join("\n"));
  process.exit(1);
});

let answer;
const port = { postMessage: (bytes) => answer(bytes) };
vm.runInContext(readFileSync(join(folder, "engine_bundle.js"), "utf8"), scope);
scope.onmessage({ data: port });

createServer((connection) => {
  connection.on("data", (bytes) => {
    answer = (reply) => connection.write(reply);
    port.onmessage({ data: local(bytes) });
  });
}).listen(socketPath, () => console.log("ready"));
