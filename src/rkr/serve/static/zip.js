"use strict";
// A zip file without compression: pictures are compressed already.
const crcTable = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let k = 0; k < 8; k++) n = n & 1 ? 0xedb88320 ^ (n >>> 1) : n >>> 1;
  return n >>> 0;
});
function crc32(bytes) {
  let sum = 0xffffffff;
  for (const byte of bytes) sum = crcTable[(sum ^ byte) & 255] ^ (sum >>> 8);
  return (sum ^ 0xffffffff) >>> 0;
}
function record(fields) {
  const size = fields.reduce((sum, [width]) => sum + width, 0);
  const view = new DataView(new ArrayBuffer(size));
  let at = 0;
  for (const [width, value] of fields) {
    width === 2 ? view.setUint16(at, value, true) : view.setUint32(at, value, true);
    at += width;
  }
  return view.buffer;
}
async function zipped(files) {
  const parts = [], directory = [];
  let offset = 0;
  for (const { path, file } of files) {
    const name = new TextEncoder().encode(path), data = new Uint8Array(await file.arrayBuffer());
    const common = [[2, 20], [2, 0x800], [2, 0], [2, 0], [2, 33], [4, crc32(data)], [4, data.length], [4, data.length], [2, name.length], [2, 0]];
    const local = record([[4, 0x04034b50], ...common]);
    parts.push(local, name, data);
    directory.push(record([[4, 0x02014b50], [2, 20], ...common, [2, 0], [2, 0], [2, 0], [4, 0], [4, offset]]), name);
    offset += local.byteLength + name.length + data.length;
  }
  const size = directory.reduce((sum, part) => sum + part.byteLength, 0);
  const end = record([[4, 0x06054b50], [2, 0], [2, 0], [2, files.length], [2, files.length], [4, size], [4, offset], [2, 0]]);
  return new Blob([...parts, ...directory, end], { type: "application/zip" });
}
