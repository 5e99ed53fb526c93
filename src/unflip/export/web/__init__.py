"""Packed networks in the browser: ``unflip.export.web.page.export_html("model.unflip", "page.html")``.

The JavaScript files of this folder are the npm package. ``make web`` compiles the WebAssembly modules into it.
"""
