"""The command line. ``lit_llm.cli.main`` imports neither torch nor Lightning before a command needs them."""
