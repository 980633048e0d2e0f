"""The local page: runs of a folder in a browser. Needs the extra `web` (starlette, uvicorn).

`serve` runs it until Ctrl-C. `app` puts it together, `guard` decides who may ask, `served` answers from files, `jobs`
starts and stops runs, `page/` is what the browser gets.
"""

from longtune.watch.web.serve import serve

__all__ = ["serve"]
