//! Says what is wrong with a certificate.

use std::error::Error;
use std::io;

use rustls::{AlertDescription, CertificateError};

/// Describes the TLS error among the causes of an error; `None` if there is none.
pub(super) fn reason(error: &(dyn Error + 'static)) -> Option<String> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(found) = of_tls(error) {
            return Some(words(found));
        }
        cause = error.source();
    }
    None
}

/// An error of TLS, or one inside a system error, which does not name it as its cause.
fn of_tls<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a rustls::Error> {
    error.downcast_ref().or_else(|| {
        let inner = error.downcast_ref::<io::Error>()?.get_ref()?;
        inner.downcast_ref()
    })
}

fn words(error: &rustls::Error) -> String {
    use CertificateError as Bad;
    match error {
        rustls::Error::InvalidCertificate(bad) => match bad {
            // An authority of the same name may have another key.
            Bad::UnknownIssuer | Bad::BadSignature => {
                "no CA in --api-ca has signed the agent's certificate".to_owned()
            }
            Bad::Expired | Bad::ExpiredContext { .. } => {
                "the agent's certificate has expired".to_owned()
            }
            Bad::NotValidYet | Bad::NotValidYetContext { .. } => {
                "the agent's certificate is not valid yet".to_owned()
            }
            Bad::NotValidForName | Bad::NotValidForNameContext { .. } => {
                format!("the agent's certificate is for another host: {bad}")
            }
            _ => format!("the agent's certificate is not valid: {bad}"),
        },
        // From the agent, about the client's certificate (RFC 8446 section 6.2).
        rustls::Error::AlertReceived(alert) => match alert {
            AlertDescription::UnknownCA | AlertDescription::DecryptError => {
                "no CA that the agent knows has signed the client certificate".to_owned()
            }
            AlertDescription::CertificateExpired => {
                "the client certificate has expired, or is not valid yet".to_owned()
            }
            AlertDescription::CertificateRequired => {
                "the agent requires a client certificate; set --api-client-certificate and \
                 --api-client-key"
                    .to_owned()
            }
            _ => format!("the agent refused the client certificate: {alert:?}"),
        },
        _ => error.to_string(),
    }
}
