"""HTTP/1.1 server on asyncio and httptools, for any service that serves a page or an API."""
