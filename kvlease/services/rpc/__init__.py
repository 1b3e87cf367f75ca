"""The RPC door and its client: MessagePack frames over TCP or Unix sockets (docs/rpc.md)."""
