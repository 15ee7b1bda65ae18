"""The text of a small cluster's file: equal nodes of CPU workers over loopback."""


def cluster_text(name="two", workers=2, *, nodes=1, memory="4e9", bandwidth="2e9", price=None, power=""):
    between = ', between = "loop"' if nodes > 1 else ""
    priced = "" if price is None else f"price_per_hour = {price}\n"
    return f"""
name = "{name}"
groups = [{{ nodes = {nodes}, workers = {workers}, device = "cpu", within = "loop"{between} }}]
[devices.cpu]
memory = {memory}
memory_bandwidth = 1e10
{priced}{power}[devices.cpu.peak]
float32 = 5e10
[links.loop]
latency = 5e-5
bandwidth = {bandwidth}
"""
