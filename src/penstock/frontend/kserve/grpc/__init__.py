"""The gRPC service of KServe's protocol, as Triton has it. Needs the extra `grpc`; only `serve` imports it."""

from penstock.frontend.kserve.grpc.server import GRPCServer
