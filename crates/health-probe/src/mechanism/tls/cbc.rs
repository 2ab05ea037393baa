//! The TLS 1.2 suites with AES-CBC and HMAC-SHA1 (RFC 5246, 6.2.3.2; RFC 4492), which old servers insist on and Go also
//! supports. They are for probes that verify nothing and have no secrets, so errors need not take constant time.

use aes::cipher::{BlockCipherDecrypt, BlockCipherEncrypt, KeyInit};
use aes::{Aes128, Aes256, Block};
use ring::hmac::{self, HMAC_SHA1_FOR_LEGACY_USE_ONLY};
use ring::rand::{SecureRandom as _, SystemRandom};
use rustls::crypto::cipher::{
    AeadKey, InboundOpaqueMessage, InboundPlainMessage, KeyBlockShape, MessageDecrypter,
    MessageEncrypter, OutboundOpaqueMessage, OutboundPlainMessage, PrefixedPayload,
    Tls12AeadAlgorithm, UnsupportedOperationError, make_tls12_aad,
};
use rustls::crypto::{CryptoProvider, GetRandomFailed, KeyExchangeAlgorithm};
use rustls::{
    CipherSuite, CipherSuiteCommon, ConnectionTrafficSecrets, Error, SignatureScheme,
    SupportedCipherSuite, Tls12CipherSuite,
};

const BLOCK_LEN: usize = 16;
/// Length of HMAC-SHA1 keys and codes, in bytes.
const MAC_LEN: usize = 20;
/// Maximum size of the content of a record (RFC 5246, 6.2.1).
const CONTENT_MAX: usize = 1 << 14;
/// Maximum number of records with one key. No probe sends that many.
const RECORDS_MAX: u64 = 1 << 24;

/// The suites, those with shorter keys first, in Go's order of preference. Hash and PRF come from one of the provider's
/// suites with SHA-256.
pub(super) fn suites(provider: &CryptoProvider) -> Vec<SupportedCipherSuite> {
    let model = provider.cipher_suites.iter().find_map(|suite| match suite {
        SupportedCipherSuite::Tls12(suite)
            if suite.common.suite == CipherSuite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256 =>
        {
            Some(*suite)
        }
        _ => None,
    });
    let Some(model) = model else {
        return Vec::new();
    };
    [
        (
            CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA,
            ECDSA,
            AES_128,
        ),
        (
            CipherSuite::TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA,
            RSA,
            AES_128,
        ),
        (
            CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA,
            ECDSA,
            AES_256,
        ),
        (
            CipherSuite::TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA,
            RSA,
            AES_256,
        ),
    ]
    .map(|(suite, sign, aead_alg)| {
        // Leaks once per process.
        SupportedCipherSuite::Tls12(Box::leak(Box::new(Tls12CipherSuite {
            common: CipherSuiteCommon {
                suite,
                hash_provider: model.common.hash_provider,
                confidentiality_limit: RECORDS_MAX,
            },
            prf_provider: model.prf_provider,
            kx: KeyExchangeAlgorithm::ECDHE,
            sign,
            aead_alg,
        })))
    })
    .to_vec()
}

/// The signature schemes of a suite's server; only the algorithm matters.
static ECDSA: &[SignatureScheme] = &[
    SignatureScheme::ECDSA_NISTP256_SHA256,
    SignatureScheme::ED25519,
];
static RSA: &[SignatureScheme] = &[
    SignatureScheme::RSA_PSS_SHA256,
    SignatureScheme::RSA_PKCS1_SHA256,
];

static AES_128: &dyn Tls12AeadAlgorithm = &Cbc { key_len: 16 };
static AES_256: &dyn Tls12AeadAlgorithm = &Cbc { key_len: 32 };

/// AES-CBC with HMAC-SHA1. The key block holds both sides' MAC keys before the cipher keys, and no initialisation
/// vectors: what rustls calls keys are the MAC keys, and what it calls vectors are the cipher keys.
struct Cbc {
    key_len: usize,
}

impl Tls12AeadAlgorithm for Cbc {
    fn encrypter(&self, mac: AeadKey, key: &[u8], _: &[u8]) -> Box<dyn MessageEncrypter> {
        Box::new(Keys::new(mac.as_ref(), key))
    }

    fn decrypter(&self, mac: AeadKey, key: &[u8]) -> Box<dyn MessageDecrypter> {
        Box::new(Keys::new(mac.as_ref(), key))
    }

    fn key_block_shape(&self) -> KeyBlockShape {
        KeyBlockShape {
            enc_key_len: MAC_LEN,
            fixed_iv_len: self.key_len,
            explicit_nonce_len: 0,
        }
    }

    fn extract_keys(
        &self,
        _: AeadKey,
        _: &[u8],
        _: &[u8],
    ) -> Result<ConnectionTrafficSecrets, UnsupportedOperationError> {
        Err(UnsupportedOperationError)
    }
}

enum Aes {
    With128(Box<Aes128>),
    With256(Box<Aes256>),
}

/// The keys of one direction.
struct Keys {
    mac: hmac::Key,
    /// `None` for a key length that no suite has.
    cipher: Option<Aes>,
}

impl Keys {
    fn new(mac: &[u8], key: &[u8]) -> Self {
        let short = Aes128::new_from_slice(key).map(|key| Aes::With128(Box::new(key)));
        let long = || Aes256::new_from_slice(key).map(|key| Aes::With256(Box::new(key)));
        Self {
            mac: hmac::Key::new(HMAC_SHA1_FOR_LEGACY_USE_ONLY, mac),
            cipher: short.or_else(|_| long()).ok(),
        }
    }

    /// The MAC of a record: over its sequence number, header and content.
    fn code(&self, head: &[u8], content: &[u8]) -> hmac::Tag {
        let mut code = hmac::Context::with_key(&self.mac);
        code.update(head);
        code.update(content);
        code.sign()
    }

    /// Encrypts whole blocks in place.
    fn encipher(&self, vector: &[u8; BLOCK_LEN], text: &mut [u8]) -> Option<()> {
        let cipher = self.cipher.as_ref()?;
        let mut last = *vector;
        for block in text.chunks_exact_mut(BLOCK_LEN) {
            xor(block, &last);
            let block: &mut Block = block.try_into().ok()?;
            match cipher {
                Aes::With128(cipher) => cipher.encrypt_block(block),
                Aes::With256(cipher) => cipher.encrypt_block(block),
            }
            last = (*block).into();
        }
        Some(())
    }

    /// Decrypts whole blocks in place.
    fn decipher(&self, vector: &[u8; BLOCK_LEN], text: &mut [u8]) -> Option<()> {
        let cipher = self.cipher.as_ref()?;
        let mut last = *vector;
        for block in text.chunks_exact_mut(BLOCK_LEN) {
            let before: [u8; BLOCK_LEN] = (&*block).try_into().ok()?;
            let decrypted: &mut Block = block.try_into().ok()?;
            match cipher {
                Aes::With128(cipher) => cipher.decrypt_block(decrypted),
                Aes::With256(cipher) => cipher.decrypt_block(decrypted),
            }
            xor(decrypted, &last);
            last = before;
        }
        Some(())
    }

    /// Decrypts a record's blocks in place, and returns the length of content and MAC.
    fn unpadded(&self, record: &mut [u8]) -> Option<usize> {
        let (vector, text) = record.split_first_chunk_mut::<BLOCK_LEN>()?;
        if !text.len().is_multiple_of(BLOCK_LEN) {
            return None;
        }
        self.decipher(vector, text)?;
        let padding = usize::from(*text.last()?);
        let rest = text.len().checked_sub(padding + 1)?;
        let is_padding = text[rest..]
            .iter()
            .all(|byte| usize::from(*byte) == padding);
        is_padding.then_some(rest)
    }
}

fn xor(block: &mut [u8], with: &[u8]) {
    for (byte, with) in block.iter_mut().zip(with) {
        *byte ^= with;
    }
}

impl MessageEncrypter for Keys {
    fn encrypt(
        &mut self,
        message: OutboundPlainMessage<'_>,
        number: u64,
    ) -> Result<OutboundOpaqueMessage, Error> {
        let len = message.payload.len();
        let mut vector = [0; BLOCK_LEN];
        let random = SystemRandom::new();
        random.fill(&mut vector).map_err(|_| GetRandomFailed)?;
        let mut record = PrefixedPayload::with_capacity(self.encrypted_payload_len(len));
        record.extend_from_slice(&vector);
        record.extend_from_chunks(&message.payload);
        let head = make_tls12_aad(number, message.typ, message.version, len);
        let code = self.code(&head, &record.as_ref()[BLOCK_LEN..]);
        record.extend_from_slice(code.as_ref());
        let padding = BLOCK_LEN - 1 - (len + MAC_LEN) % BLOCK_LEN;
        record.extend_from_slice(&[padding as u8; BLOCK_LEN][..=padding]);
        self.encipher(&vector, &mut record.as_mut()[BLOCK_LEN..])
            .ok_or(Error::EncryptError)?;
        Ok(OutboundOpaqueMessage::new(
            message.typ,
            message.version,
            record,
        ))
    }

    fn encrypted_payload_len(&self, len: usize) -> usize {
        BLOCK_LEN + (len + MAC_LEN + 1).next_multiple_of(BLOCK_LEN)
    }
}

impl MessageDecrypter for Keys {
    fn decrypt<'a>(
        &mut self,
        mut message: InboundOpaqueMessage<'a>,
        number: u64,
    ) -> Result<InboundPlainMessage<'a>, Error> {
        let rest = self.unpadded(&mut message.payload);
        let len = rest.and_then(|rest| rest.checked_sub(MAC_LEN));
        let len = len.ok_or(Error::DecryptError)?;
        if len > CONTENT_MAX {
            return Err(Error::PeerSentOversizedRecord);
        }
        let (content, code) = message.payload[BLOCK_LEN..][..len + MAC_LEN].split_at(len);
        let head = make_tls12_aad(number, message.typ, message.version, len);
        if self.code(&head, content).as_ref() != code {
            return Err(Error::DecryptError);
        }
        Ok(message.into_plain_message_range(BLOCK_LEN..BLOCK_LEN + len))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rustls::{ContentType, ProtocolVersion};

    use super::*;

    const VERSION: ProtocolVersion = ProtocolVersion::TLSv1_2;
    const DATA: ContentType = ContentType::ApplicationData;

    fn sealed(keys: &mut Keys, content: &[u8], number: u64) -> Vec<u8> {
        let message = OutboundPlainMessage {
            typ: DATA,
            version: VERSION,
            payload: content.into(),
        };
        let sealed = MessageEncrypter::encrypt(keys, message, number).unwrap();
        let record = sealed.encode()[5..].to_vec();
        assert_eq!(record.len(), keys.encrypted_payload_len(content.len()));
        record
    }

    fn opened(keys: &mut Keys, record: &mut [u8], number: u64) -> Result<Vec<u8>, Error> {
        let message = InboundOpaqueMessage::new(DATA, VERSION, record);
        let opened = MessageDecrypter::decrypt(keys, message, number)?;
        Ok(opened.payload.to_vec())
    }

    proptest! {
        #[test]
        fn what_was_sealed_opens_once_and_whatever_else_comes_is_an_error(
            content in prop::collection::vec(any::<u8>(), 0..200),
            is_long in any::<bool>(),
            flipped in any::<prop::sample::Index>(),
            cut in any::<prop::sample::Index>(),
        ) {
            let key = if is_long { &[7; 32][..] } else { &[7; 16] };
            let mut keys = Keys::new(&[3; MAC_LEN], key);
            let record = sealed(&mut keys, &content, 5);
            prop_assert_eq!(opened(&mut keys, &mut record.clone(), 5), Ok(content));
            prop_assert_eq!(opened(&mut keys, &mut record.clone(), 6), Err(Error::DecryptError));
            let mut damaged = record.clone();
            damaged[flipped.index(record.len())] ^= 1;
            prop_assert_eq!(opened(&mut keys, &mut damaged, 5), Err(Error::DecryptError));
            let mut short = record[..cut.index(record.len())].to_vec();
            prop_assert_eq!(opened(&mut keys, &mut short, 5), Err(Error::DecryptError));
        }
    }
}
