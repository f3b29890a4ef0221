// One reliable connection between two processes: the asker READs, the answerer's processor does nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <string>

#include "device.hpp"

namespace millrace::verbs {

// What the other side must know of a queue pair.
struct Address {
    uint32_t number;
    uint32_t sequence;  // first packet sequence number, 24 bits
    uint16_t lid;
    Gid gid;
    uint8_t mtu;
    uint8_t reads;
};

// READs complete in order, so two counters tell how far it is. Not safe for threads; destroying it ends every READ:
// when close() returns the device writes to no region any more.
class QueuePair {
public:
    // `asks`: it will READ; one that does not only answers READs. `depth`: READs posted at most.
    QueuePair(std::shared_ptr<Device> device, std::shared_ptr<Region> region, bool asks, uint32_t depth);
    ~QueuePair();
    QueuePair(const QueuePair&) = delete;
    QueuePair& operator=(const QueuePair&) = delete;

    Address address() const;
    // Brings it to life. `timeout`: of one packet, 4.096 us * 2^timeout; seven are tried.
    void connect(const Address& peer, uint8_t timeout);
    // Posts READs of these pieces, from the first on, as long as there is room; returns how many.
    // `source`: addresses at the peer, `target`: in the region.
    size_t post(std::span<const int64_t> source, std::span<const int64_t> target, std::span<const int64_t> lengths,
                uint32_t remote_key);
    // Collects completions. Throws VerbsError: a READ failed, and with it all after it.
    void poll();
    void close();

    uint64_t posted() const { return posted_; }
    uint64_t completed() const { return completed_; }

private:
    void post_batch(ibv_send_wr* first, size_t count);
    void modify(ibv_qp_attr& attributes, int mask, const char* what);
    void require_open() const;

    std::shared_ptr<Device> device_;
    std::shared_ptr<Region> region_;
    bool asks_;
    uint32_t depth_;
    uint32_t sequence_;
    ibv_cq* completions_ = nullptr;
    ibv_qp* pair_ = nullptr;
    uint64_t posted_ = 0;
    uint64_t completed_ = 0;
};

}  // namespace millrace::verbs
