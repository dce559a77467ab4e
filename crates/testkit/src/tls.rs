//! `testkit tls`: TLS before a server that has none, with a certificate that no system trusts.
//!
//! In: a command line. Out: a file with the certificate of an authority that was made a moment ago, and `listening https://localhost:PORT` on standard output; then what clients send in TLS goes to the server as it is, and its answers
//! come back. SIGTERM and SIGINT end it with status 0. What can fail at the start is one line on standard error and status 1.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tokio::io::copy_bidirectional;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

use crate::server::{self, ServerError};

/// Whose certificate it is.
const NAMES: [&str; 2] = ["localhost", "127.0.0.1"];
/// How the authority is called.
const AUTHORITY: &str = "testkit's own authority";

/// The command line of `testkit tls`.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Address to listen on; port 0 takes a free one
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:0")]
    addr: SocketAddr,
    /// Server that gets what is left of TLS
    #[arg(long, value_name = "ADDR:PORT")]
    to: SocketAddr,
    /// File that the authority's certificate (PEM) is written to
    #[arg(long, value_name = "FILE")]
    ca: PathBuf,
}

#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error("certificates cannot be made")]
    Certificate(#[from] rcgen::Error),
    #[error("TLS cannot be set up")]
    Tls(#[from] tokio_rustls::rustls::Error),
    #[error("{path} cannot be written")]
    Ca { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Server(#[from] ServerError),
}

/// Serves until SIGTERM or SIGINT.
pub(crate) fn run(args: Args) -> ExitCode {
    server::run("tls", serve(args))
}

async fn serve(args: Args) -> Result<(), ServeError> {
    let (ca, config) = certified()?;
    std::fs::write(&args.ca, ca).map_err(|source| ServeError::Ca {
        path: args.ca.clone(),
        source,
    })?;
    let url = |addr: SocketAddr| format!("https://localhost:{}", addr.port());
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let connection = |stream: TcpStream, _stopped| {
        let acceptor = acceptor.clone();
        async move {
            // A client that does not trust us ends it here.
            let Ok(mut stream) = acceptor.accept(stream).await else {
                return;
            };
            if let Ok(mut onward) = TcpStream::connect(args.to).await {
                let _ = onward.set_nodelay(true);
                let _ = copy_bidirectional(&mut stream, &mut onward).await;
            }
        }
    };
    Ok(server::serve_as(url, args.addr, connection).await?)
}

/// A new authority's certificate in PEM, and a server that shows one of its making.
fn certified() -> Result<(String, ServerConfig), ServeError> {
    let authority_key = KeyPair::generate()?;
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority
        .distinguished_name
        .push(DnType::CommonName, AUTHORITY);
    let ca = authority.self_signed(&authority_key)?;
    let key = KeyPair::generate()?;
    let issuer = Issuer::new(authority, authority_key);
    let names = NAMES.map(str::to_owned).to_vec();
    let certificate = CertificateParams::new(names)?.signed_by(&key, &issuer)?;
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key)?;
    Ok((ca.pem(), config))
}
