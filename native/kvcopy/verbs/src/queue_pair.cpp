#include "queue_pair.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

namespace millrace::verbs {

namespace {

// Work requests handed to the device with one call.
constexpr size_t kBatch = 64;
// Every so many READs one tells that it and all before it are complete.
constexpr uint64_t kSignalEvery = 16;
constexpr int kPolledAtOnce = 32;
constexpr uint8_t kRetries = 7;
constexpr uint8_t kHops = 64;

}  // namespace

QueuePair::QueuePair(std::shared_ptr<Device> device, std::shared_ptr<Region> region, bool asks, uint32_t depth)
    : device_(std::move(device)), region_(std::move(region)), asks_(asks), depth_(depth) {
    sequence_ = std::random_device{}() & 0xffffff;
    completions_ = ibv_create_cq(device_->context(), static_cast<int>(depth_ + 1), nullptr, nullptr, 0);
    if (!completions_) fail("ibv_create_cq", errno);
    ibv_qp_init_attr wanted{};
    wanted.send_cq = wanted.recv_cq = completions_;
    wanted.qp_type = IBV_QPT_RC;
    wanted.cap = {.max_send_wr = depth_, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    pair_ = ibv_create_qp(device_->domain(), &wanted);
    if (!pair_) {
        const int error = errno;
        ibv_destroy_cq(completions_);
        fail("ibv_create_qp", error);
    }
}

QueuePair::~QueuePair() { close(); }

void QueuePair::close() {
    if (pair_) ibv_destroy_qp(pair_);
    if (completions_) ibv_destroy_cq(completions_);
    pair_ = nullptr;
    completions_ = nullptr;
}

void QueuePair::require_open() const {
    if (!pair_) throw VerbsError("the queue pair is closed");
}

Address QueuePair::address() const {
    require_open();
    return {pair_->qp_num, sequence_, device_->lid(), device_->gid(), device_->mtu(), device_->reads_max()};
}

void QueuePair::modify(ibv_qp_attr& attributes, int mask, const char* what) {
    if (int error = ibv_modify_qp(pair_, &attributes, mask)) fail(std::string("ibv_modify_qp to ") + what, error);
}

void QueuePair::connect(const Address& peer, uint8_t timeout) {
    require_open();
    const uint8_t reads = std::clamp<uint8_t>(std::min(peer.reads, device_->reads_max()), 1, 255);
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_INIT;
    attributes.port_num = device_->port();
    // Whoever asks lets the other side touch nothing of its own through this connection.
    attributes.qp_access_flags = asks_ ? 0 : IBV_ACCESS_REMOTE_READ;
    modify(attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "INIT");

    attributes = {};
    attributes.qp_state = IBV_QPS_RTR;
    attributes.path_mtu = static_cast<ibv_mtu>(std::min(peer.mtu, device_->mtu()));
    attributes.dest_qp_num = peer.number;
    attributes.rq_psn = peer.sequence & 0xffffff;
    attributes.max_dest_rd_atomic = reads;
    attributes.min_rnr_timer = 12;
    attributes.ah_attr.dlid = peer.lid;
    attributes.ah_attr.port_num = device_->port();
    if (device_->routed() || peer.lid == 0) {
        attributes.ah_attr.is_global = 1;
        std::copy(peer.gid.begin(), peer.gid.end(), std::begin(attributes.ah_attr.grh.dgid.raw));
        attributes.ah_attr.grh.sgid_index = device_->gid_index();
        attributes.ah_attr.grh.hop_limit = kHops;
    }
    modify(attributes,
           IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
               IBV_QP_MIN_RNR_TIMER,
           "RTR");
    if (!asks_) return;  // answering needs no more

    attributes = {};
    attributes.qp_state = IBV_QPS_RTS;
    attributes.sq_psn = sequence_;
    attributes.timeout = timeout;
    attributes.retry_cnt = kRetries;
    attributes.rnr_retry = kRetries;
    attributes.max_rd_atomic = reads;
    modify(
        attributes,
        IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC,
        "RTS");
}

size_t QueuePair::post(std::span<const int64_t> source, std::span<const int64_t> target,
                       std::span<const int64_t> lengths, uint32_t remote_key) {
    require_open();
    if (!region_->open()) throw VerbsError("the region is closed");
    const size_t room = depth_ - static_cast<size_t>(posted_ - completed_);
    const size_t wanted = std::min(lengths.size(), room);
    std::array<ibv_send_wr, kBatch> requests;
    std::array<ibv_sge, kBatch> pieces;
    size_t done = 0;
    while (done < wanted) {
        const size_t count = std::min(kBatch, wanted - done);
        for (size_t i = 0; i < count; ++i) {
            const size_t at = done + i;
            const auto place = static_cast<uint64_t>(target[at]);
            const auto length = static_cast<uint64_t>(lengths[at]);
            // The device would refuse it too, but break the connection by it.
            if (length == 0 || length > region_->bytes() || place < region_->address() ||
                place - region_->address() > region_->bytes() - length || length > device_->message_bytes_max()) {
                throw VerbsError("a piece is outside the region, or too long");
            }
            const uint64_t number = posted_ + i + 1;
            pieces[i] = {.addr = place, .length = static_cast<uint32_t>(length), .lkey = region_->local_key()};
            requests[i] = {};
            requests[i].wr_id = number;
            requests[i].next = i + 1 < count ? &requests[i + 1] : nullptr;
            requests[i].sg_list = &pieces[i];
            requests[i].num_sge = 1;
            requests[i].opcode = IBV_WR_RDMA_READ;
            const bool last = at + 1 == wanted;
            requests[i].send_flags = last || number % kSignalEvery == 0 ? static_cast<unsigned>(IBV_SEND_SIGNALED) : 0U;
            requests[i].wr.rdma.remote_addr = static_cast<uint64_t>(source[at]);
            requests[i].wr.rdma.rkey = remote_key;
        }
        post_batch(requests.data(), count);
        done += count;
    }
    return done;
}

void QueuePair::post_batch(ibv_send_wr* first, size_t count) {
    ibv_send_wr* refused = nullptr;
    if (int error = ibv_post_send(pair_, first, &refused)) fail("ibv_post_send", error);
    posted_ += count;
}

void QueuePair::poll() {
    require_open();
    std::array<ibv_wc, kPolledAtOnce> done;
    int count = 0;
    do {
        count = ibv_poll_cq(completions_, kPolledAtOnce, done.data());
        if (count < 0) throw VerbsError("ibv_poll_cq failed");
        for (int i = 0; i < count; ++i) {
            if (done[i].status != IBV_WC_SUCCESS) {
                throw VerbsError(std::string("an RDMA READ failed: ") + ibv_wc_status_str(done[i].status));
            }
            completed_ = done[i].wr_id;
        }
    } while (count == kPolledAtOnce);
}

}  // namespace millrace::verbs
