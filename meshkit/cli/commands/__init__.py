"""The commands and their flags, by family. What a command does lies in the modules of meshkit.cli, which are
imported when it runs.
"""
