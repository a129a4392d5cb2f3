"""One behaviour suite for all client protocols, each spoken by its official client over a socket.

`speakers/` has a file for each: what a harness author would write with that client. `world.py` puts the scripted engine, the
gateway's own vLLM client and the gateway behind it.
"""
