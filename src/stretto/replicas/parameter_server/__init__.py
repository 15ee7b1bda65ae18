"""A parameter server: replicas push gradients when they have them, and take the newest weights.

    replica (client)                     counter (tickets)               servers of all shards (shard)
       | may I make the next update? ------------>|
       |<----- yes, it is number n ---------------|  (once every other replica can still stay within the bound)
       | gradients, n ------------------------------------------------------>|
       |<-------------------- weights changed since this replica's last -----|  (once all updates before n are applied)

`client` is the replica's side, and connects it with servers; `tickets` gives out the numbers of updates and keeps the
log that another run can follow; `shard` holds weights and steps them. Servers are in this process
(`emulate/emulator.py`) or in the processes of all replicas, over torch.distributed (`runtime/remote_servers.py`,
which describes the messages).
"""
