"""Sections of pages that one study alone has, where its own file would grow too long."""
