// The part of dns-packet 5 that the DNSSEC stub and the DNS server of the tests use; the package brings no types.
declare module 'dns-packet' {
  export interface PacketQuestion {
    readonly name: string;
    readonly type: string;
    readonly class?: string;
  }
  export interface PacketAnswer {
    readonly name: string;
    readonly type: string;
    readonly class?: string;
    readonly ttl: number;
    /** By type: text of an address or a name, an object of an MX or TLSA record. */
    readonly data: unknown;
  }
  /** `udpPayloadSize` and `flags` are of the OPT record. */
  export interface PacketExtra {
    readonly type: string;
    readonly name?: string;
    readonly udpPayloadSize?: number;
    readonly flags?: number;
    /** The upper bits of the rcode. */
    readonly extendedRcode?: number;
    /** When decoded: DNSSEC records are welcome. */
    readonly flag_do?: boolean;
  }
  export interface Packet {
    readonly type?: 'query' | 'response';
    readonly id: number;
    /** The second 16 bits of the header; an rcode in the lowest four. */
    readonly flags: number;
    readonly questions: readonly PacketQuestion[];
    readonly answers?: readonly PacketAnswer[];
    readonly authorities?: readonly PacketAnswer[];
    readonly additionals?: readonly PacketExtra[];
  }
  const dnsPacket: {
    /** Throws on bytes that are no DNS message. */
    readonly decode: (bytes: Buffer) => Packet;
    readonly encode: (packet: Packet) => Buffer;
    /** With the two bytes of length that TCP wants. */
    readonly streamEncode: (packet: Packet) => Buffer;
    readonly AUTHORITATIVE_ANSWER: number;
    readonly AUTHENTIC_DATA: number;
    readonly RECURSION_DESIRED: number;
    readonly RECURSION_AVAILABLE: number;
    readonly TRUNCATED_RESPONSE: number;
    readonly DNSSEC_OK: number;
  };
  export default dnsPacket;
}
