//! Key exchange on P-521, which ring lacks and some servers that the kubelet can probe insist on.

use p521::elliptic_curve::sec1::ToSec1Point as _;
use p521::{PublicKey, SecretKey, ecdh};
use ring::rand::{SecureRandom as _, SystemRandom};
use rustls::crypto::{ActiveKeyExchange, GetRandomFailed, SharedSecret, SupportedKxGroup};
use rustls::{Error, NamedGroup, PeerMisbehaved};

/// Length of a scalar in bytes. The first byte has only one significant bit.
const SCALAR_LEN: usize = 66;
const FIRST_MASK: u8 = 1;
/// First byte of an uncompressed point (SEC 1, 2.3.3), the only form in TLS.
const UNCOMPRESSED: u8 = 4;

/// The group `secp521r1`.
#[derive(Debug)]
pub(super) struct P521;

struct Exchange {
    secret: SecretKey,
    public: Box<[u8]>,
}

impl SupportedKxGroup for P521 {
    fn start(&self) -> Result<Box<dyn ActiveKeyExchange>, Error> {
        let random = SystemRandom::new();
        let secret = loop {
            let mut bytes = [0; SCALAR_LEN];
            random.fill(&mut bytes).map_err(|_| GetRandomFailed)?;
            bytes[0] &= FIRST_MASK;
            // All but one in 2^260 values are below the group's order.
            if let Ok(secret) = SecretKey::from_slice(&bytes) {
                break secret;
            }
        };
        let public = secret.public_key().to_sec1_point(false);
        Ok(Box::new(Exchange {
            public: public.as_bytes().into(),
            secret,
        }))
    }

    fn name(&self) -> NamedGroup {
        NamedGroup::secp521r1
    }
}

impl ActiveKeyExchange for Exchange {
    fn complete(self: Box<Self>, peer: &[u8]) -> Result<SharedSecret, Error> {
        let is_well_formed = peer.first() == Some(&UNCOMPRESSED);
        let peer = PublicKey::from_sec1_bytes(peer).ok();
        let peer = peer.filter(|_| is_well_formed);
        let peer = peer.ok_or(PeerMisbehaved::InvalidKeyShare)?;
        let shared = ecdh::diffie_hellman(self.secret.to_nonzero_scalar(), peer.as_affine());
        Ok(SharedSecret::from(shared.raw_secret_bytes().as_slice()))
    }

    fn pub_key(&self) -> &[u8] {
        &self.public
    }

    fn group(&self) -> NamedGroup {
        NamedGroup::secp521r1
    }
}
