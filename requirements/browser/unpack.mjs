// Unpacks the browser where TMPDIR points, with the package's own code: `chromium`, its graphics
// libraries beside it, and in al2023/lib the libraries that a bare machine lacks (NSS, expat).
// Runs in a folder where `npm ci` has put the package.
import { join } from "node:path";
import chromium, { inflate } from "@sparticuz/chromium";

await chromium.executablePath();
await inflate(join(import.meta.dirname, "node_modules/@sparticuz/chromium/bin/al2023.tar.br"));
