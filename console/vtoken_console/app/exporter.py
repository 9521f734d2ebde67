"""The export key: writes the screen's contents to the current directory or to the browser."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

from textual.app import App

from vtoken_console.app.frames import Frames
from vtoken_console.app.session import Session
from vtoken_console.screens.dashboard import Dashboard


class Exporter:
    """`open_dialog` lets the user choose a format; `files` builds the files."""

    def __init__(
        self, app: App[int], session: Session, frames: Frames, dashboard: Dashboard
    ) -> None:
        self._app = app
        self._session = session
        self._frames = frames
        self._dashboard = dashboard

    async def open_dialog(self) -> None:
        from vtoken_console.screens.export import ExportScreen

        model = self._session.model
        if model is None or not model.synced:
            self._dashboard.show_message("Nothing to export yet: no data.", is_error=True)
        elif not isinstance(self._app.screen, ExportScreen):
            await self._app.push_screen(ExportScreen(), self._on_choice)

    async def _on_choice(self, kind: str | None) -> None:
        if kind is not None:
            # After the refresh, the screen is drawn without the dialog.
            self._app.call_after_refresh(self._export, kind)

    async def _export(self, kind: str) -> None:
        from vtoken_console.export.raster import PngUnavailable

        try:
            files = await self.files(kind)
            self._dashboard.show_message(f"Exported {await self._hand_over(files)}.")
        except PngUnavailable as reason:
            self._dashboard.show_message(f"No PNG: {reason}. SVG needs nothing.", is_error=True)
        except OSError as error:
            self._dashboard.show_message(f"Not exported: {error}.", is_error=True)

    async def files(self, kind: str) -> dict[str, bytes]:
        """Contents by file name. Raises PngUnavailable."""
        from vtoken_console.export import files
        from vtoken_console.export.dots import with_dots
        from vtoken_console.export.raster import svg_to_png

        source, url = self._session.source, self._session.url
        assert source is not None
        view, model = self._frames.view(), source.feed.model
        stem = files.stem(view.now)
        if kind == "json":
            ts = model.status.ts if model.status else view.now
            return {f"{stem}.json": await asyncio.to_thread(files.document, model, url, ts)}
        if kind == "csv":
            tables = await asyncio.to_thread(files.tables, model, source.feed.series)
            return {f"{stem}-{name}.csv": data for name, data in tables.items()}
        svg = with_dots(self._app.export_screenshot(title=f"vtoken console: {url}"))
        if kind == "svg":
            return {f"{stem}.svg": svg.encode()}
        return {f"{stem}.png": await asyncio.to_thread(svg_to_png, svg)}

    async def _hand_over(self, contents: dict[str, bytes]) -> str:
        """Writes the files, or sends them to the browser; returns where. Raises OSError."""
        from vtoken_console.export import files

        if self._app.is_web:  # the browser may be on another machine
            for name, data in contents.items():
                self._app.deliver_binary(io.BytesIO(data), save_filename=name)
            return f"{', '.join(contents)} to the browser"
        paths = await asyncio.to_thread(files.write, Path.cwd(), contents)
        if len(paths) == 1:
            return str(paths[0])
        return f"{', '.join(path.name for path in paths)} in {paths[0].parent}"
