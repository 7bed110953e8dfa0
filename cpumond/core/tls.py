"""TLS of clients: trusted authorities, and explanations why a server is not trusted."""

from __future__ import annotations

import ssl

from cpumond.core.errors import AccessError, ConfigError, describe


def make_client_context(ca_file: str, key: str) -> ssl.SSLContext:
    """Create the TLS context that trusts the authorities in ``ca_file`` (PEM) or, if that is "", those of the system.

    ``key`` names the setting of the file, for messages. Raises ConfigError or AccessError."""
    if not ca_file:
        return ssl.create_default_context()
    try:
        return ssl.create_default_context(cafile=ca_file)
    except PermissionError as error:
        text = f"{key}: {ca_file} cannot be read: {describe(error)}; make it readable for this user"
        raise AccessError(text) from None
    except ssl.SSLError:
        text = f"{key}: {ca_file} holds no certificate in PEM; give the certificate that signed the server's"
        raise ConfigError(text) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {ca_file} cannot be read: {describe(error)}") from None


def describe_tls_error(error: BaseException, advice: str) -> str:
    """Explain why a TLS connection failed; "" if the error has nothing to do with TLS.

    ``advice`` is the remedy for an unknown authority."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLCertVerificationError):
            reason = seen.verify_message.rstrip(".")
            # X509_V_ERR codes of an expired certificate, or of one for a different name: no other authority would help.
            if seen.verify_code in (9, 10, 62, 64):
                return f"its certificate is not valid: {reason}; see [api] certificate of the scheduler"
            return f"its certificate is not trusted: {reason}; {advice}"
        if isinstance(seen, ssl.SSLError):
            if seen.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
                return "it does not speak TLS; its address may have to begin with http://"
            return f"the TLS connection failed: {(seen.reason or str(seen)).replace('_', ' ').lower()}"
        seen = seen.__cause__ or seen.__context__
    return ""
