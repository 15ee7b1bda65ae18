"""How the processes of a job find each other: on one machine, and over several.

torch's own rendezvous listens on every interface and keeps its state as a pickle that whoever reaches the port can
write. Ours hands `TCPStore` a socket bound to one address. Every value is signed (`signed_store.py`; 20 to 50
microseconds a call); the signature covers the round's name and the key's. A round is named by a roster of numbers
that its nodes have just drawn (`nodes.py`), so nothing recorded earlier passes. Counting is compare-and-set of signed
numbers. Deleting and rolling back a single key remain possible: while launchers meet, each looks whether what it
wrote still stands, and ends the others if not. Encryption was not tried: gloo's connections, where the data is, have
none either.
"""
