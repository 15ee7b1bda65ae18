"""A parameter server: replicas push gradients when they have them, and take the newest weights.

    replica (client)                     counter (staleness)             servers of all shards (shard)
       | may I make the next update? ------------>|
       |<----- yes, it is number n ---------------|  (once every other replica can still stay within the bound)
       | gradients, n ------------------------------------------------------>|
       |<-------------------- weights changed since this replica's last -----|  (once all updates before n are applied)

`client` is the replica's side, `staleness` gives out the numbers of updates, `shard` holds weights and steps them,
`order` is the log that another run can follow, `servers` connects replicas with servers: in this process
(`emulate/local_servers.py`) or in the processes of all replicas, over torch.distributed (`runtime/remote_servers.py`,
which describes the messages).
"""
