"""The decoder, as a single process would run it. No parallel code lives here."""
