#!/bin/sh
# The API without a client of ours: grpcurl asks the server itself (reflection) what its messages look like.
#
#   pagewire serve models/storyteller
#   sh examples/grpcurl.sh [HOST:PORT]
#
# A server with TLS: drop -plaintext. A server with tenants: add -H "authorization: Bearer $KEY".
set -eu
address=${1:-127.0.0.1:50051}
service=pagewire.scheduler.v1.SchedulerService

echo "== what is served"
grpcurl -plaintext "$address" list "$service"

echo "== is it ready?"
grpcurl -plaintext -d "{\"service\": \"$service\"}" "$address" grpc.health.v1.Health/Check

echo "== stream a completion"
grpcurl -plaintext -d '{"text": "Once upon a time", "sampling": {"temperature": 0, "max_tokens": 8}}' \
    "$address" "$service/Generate"

echo "== submit a request under an id of our own, and poll for its result"
id=grpcurl-$$-$(date +%s)
prompt='"text": "The little fox", "sampling": {"temperature": 0, "max_tokens": 40}'
grpcurl -plaintext -d "{\"request\": {\"request_id\": \"$id\", $prompt}}" "$address" "$service/Submit"
while :; do
    result=$(grpcurl -plaintext -d "{\"request_id\": \"$id\"}" "$address" "$service/GetResult")
    case $result in *RESULT_STATE_RUNNING*) sleep 0.1 ;; *) break ;; esac
done
echo "$result" | grep -E '"(state|text)"'

echo "== or stream it, from the beginning or from any token"
grpcurl -plaintext -d "{\"request_id\": \"$id\", \"from_token\": 39}" "$address" "$service/Attach"
