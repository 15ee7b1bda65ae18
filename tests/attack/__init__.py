"""Seeded random attacks on all of Stretto; README.md has the protocol. A package, so that names cannot collide."""
