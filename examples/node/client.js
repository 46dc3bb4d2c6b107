// A client in another language: Node.js reads the .proto itself, nothing is generated.
//
//   pagewire serve models/storyteller
//   cd examples/node && npm ci && node client.js [HOST:PORT]
"use strict";

const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const PROTO = path.join(__dirname, "../../protos/pagewire/scheduler/v1/scheduler.proto");
const options = { keepCase: true, longs: String, enums: String, defaults: true, oneofs: true };
const { pagewire } = grpc.loadPackageDefinition(protoLoader.loadSync(PROTO, options));

const address = process.argv[2] ?? "127.0.0.1:50051";
const client = new pagewire.scheduler.v1.SchedulerService(address, grpc.credentials.createInsecure());

client.GetServerInfo({}, (error, info) => {
  if (error) fail(error);
  console.log(`${info.served_model_name} at ${address}`);

  const call = client.Generate({ text: "Once upon a time", sampling: { temperature: 0, max_tokens: 24 } });
  call.on("data", (response) => {
    process.stdout.write(response.text);
    if (response.finish_reason !== "FINISH_REASON_UNSPECIFIED") {
      const { prompt_tokens, completion_tokens } = response.usage;
      console.log(`\n${response.finish_reason}: ${prompt_tokens} prompt tokens, ${completion_tokens} output tokens`);
    }
  });
  call.on("error", fail);
  call.on("end", () => client.close());
});

function fail(error) {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exit(1);
}
