"""A parameter server: replicas push gradients when they have them, and take the newest weights.

    replica (client)                     who counts (staleness)          servers of all shards (shard)
       | may I make the next update? ------------>|
       |<----- yes, it is number n ---------------|  (once every other can still stay within the bound)
       | gradients, n ------------------------------------------------------>|
       |<-------------------- what has changed since this replica's last ----|  (once all numbers before n are applied)

`client` is the replica's side, `staleness` gives out numbers, `shard` holds weights and steps them, `order` is the log
by which another run goes the same way, `servers` says where they are: in this process (`emulate/local_servers.py`)
or in those of all replicas, over torch.distributed (`runtime/remote_servers.py`, which has the messages).
"""
