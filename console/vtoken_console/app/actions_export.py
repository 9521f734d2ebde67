"""The export key: writes what is on the screen into the current directory, or to the browser.

Knows the files, imported when they are made.
"""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

from vtoken_console.app.base import Base


class ExportActions(Base):
    async def action_export(self) -> None:
        from vtoken_console.screens.export import ExportScreen

        if self.source is None or not self.source.feed.model.synced:
            self.say("Nothing to export yet: no data has come.", is_error=True)
        elif not isinstance(self.screen, ExportScreen):
            await self.push_screen(ExportScreen(), self._exported)

    async def _exported(self, kind: str | None) -> None:
        if kind is not None:
            # The picture is of the page below, drawn again without the question above it.
            self.call_after_refresh(self._export, kind)

    async def _export(self, kind: str) -> None:
        from vtoken_console.export.raster import PngUnavailable

        try:
            files = await self.export_files(kind)
            self.say(f"Exported {await self._hand_over(files)}.")
        except PngUnavailable as reason:
            self.say(f"No PNG: {reason}. SVG needs nothing.", is_error=True)
        except OSError as error:
            self.say(f"Not exported: {error}.", is_error=True)

    async def export_files(self, kind: str) -> dict[str, bytes]:
        """Contents by file name. Raises PngUnavailable."""
        from vtoken_console.export import files as export
        from vtoken_console.export.raster import svg_to_png

        source = self.source
        assert source is not None
        view, model = self.make_view(), source.feed.model
        stem = export.stem(view.now)
        if kind == "json":
            ts = model.status.ts if model.status else view.now
            return {f"{stem}.json": await asyncio.to_thread(export.document, model, self.url, ts)}
        if kind == "csv":
            tables = await asyncio.to_thread(export.tables, model, source.feed.series)
            return {f"{stem}-{name}.csv": data for name, data in tables.items()}
        svg = self.export_screenshot(title=f"vtoken console: {self.url}")
        if kind == "svg":
            return {f"{stem}.svg": svg.encode()}
        return {f"{stem}.png": await asyncio.to_thread(svg_to_png, svg)}

    async def _hand_over(self, files: dict[str, bytes]) -> str:
        """Writes files, or gives them to the browser; where they went. Raises OSError."""
        from vtoken_console.export import files as export

        if self.is_web:  # the server's disk is not the reader's
            for name, data in files.items():
                self.deliver_binary(io.BytesIO(data), save_filename=name)
            return f"{', '.join(files)} to the browser"
        paths = await asyncio.to_thread(export.write, Path.cwd(), files)
        if len(paths) == 1:
            return str(paths[0])
        return f"{', '.join(path.name for path in paths)} in {paths[0].parent}"
