"""Debian's nginx, with a configuration of the docs."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.fake_model import free_port
from tests.judges import needed
from tests.waiting import until

_PROGRAM = Path("/usr/sbin/nginx")
_WHOLE = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/errors;
events {{}}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  {blocks}
}}
"""


def nginx_block() -> str:
    """Return the configuration that the docs show."""
    page = Path("docs/operate/proxy.md").read_text()
    found = re.search(r"```nginx\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


@asynccontextmanager
async def nginx(port: int) -> AsyncIterator[str]:
    """Run nginx before a server of this machine; yield the address below which that is served.

    Without it the test is skipped, or fails in the gate.
    """
    needed(_is_installed(), "nginx is missing: apt-get install nginx-light")
    listening = free_port()
    blocks = nginx_block().replace("127.0.0.1:8400", f"127.0.0.1:{port}")
    blocks = re.sub(r"listen [^;]*;", f"listen 127.0.0.1:{listening};", blocks)
    blocks = re.sub(r"\n *ssl_[^;]*;", "", blocks)
    with TemporaryDirectory() as folder:
        config = Path(folder) / "nginx.conf"
        config.write_text(_WHOLE.format(folder=folder, blocks=blocks))
        process = await asyncio.create_subprocess_exec(_PROGRAM, "-c", str(config))
        try:
            await until(lambda: _answers(listening, process))
            yield f"http://127.0.0.1:{listening}/team/bottega"
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


def _is_installed() -> bool:
    return _PROGRAM.exists()


async def _answers(port: int, process: asyncio.subprocess.Process) -> bool:
    assert process.returncode is None, "nginx refuses the configuration of the docs"
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
